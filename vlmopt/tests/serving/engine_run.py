"""Runs policies in a real vLLM engine on the CPU; test_engine.py starts it with the Python of the serving environment.

    python engine_run.py SCHEDULER_CLASS MODEL_FOLDER OUTPUT_JSON

One engine serves every policy: plain vLLM first, then the others on the same requests, then the special cases.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams

from vlmopt.errors import VlmoptError
from vlmopt.serving.policy import Decision, Options, State, decide
from vlmopt.serving.scheduler import MESSAGE, switch
from vlmopt.tests.serving.tiny_llama import VOCABULARY, make_model

MOST = 160  # output tokens that every request declares; each ends earlier, at a length that the policy cannot see
BLOCKS, BLOCK_SIZE = 24, 32
REFUSED = 123  # tokens of the prompt that the special case refuses


def requests(count: int, seed: int = 0) -> list[tuple[dict[str, Any], SamplingParams]]:
    """Prompts of 20 to 60 tokens with outputs of 30 to 150, all in one burst."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(20, 60))]
        extra = {"vlmopt_kind": "burst", "vlmopt_max_tokens": MOST}
        made.append(({"prompt_token_ids": prompt}, greedy(rng.randint(30, 150), extra)))
    return made


def greedy(tokens: int, extra: dict[str, Any]) -> SamplingParams:
    """Greedy with a penalty on what was said: no loop, so that every token depends on all before it."""
    shared = {"temperature": 0, "repetition_penalty": 2.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=tokens, extra_args=extra, **shared)


def preemptions(llm: LLM) -> int:
    """vLLM's own counter."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def run(llm: LLM, batch: list[tuple[dict[str, Any], SamplingParams]]) -> dict[str, Any]:
    before = preemptions(llm)
    prompts, params = zip(*batch, strict=True)
    answers = llm.generate(list(prompts), list(params), use_tqdm=False)
    ends = [(answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) for answer in answers]
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "wanted": [param.max_tokens for param in params],
        "finish": [finish for finish, _ in ends],
        "stop": [stop for _, stop in ends],
        "scheduled": [answer.metrics.scheduled_ts for answer in answers],
        "preemptions": preemptions(llm) - before,
        "counts": switch(llm)["counts"],
    }


def refuse_some(name: str, state: State, options: Options) -> Decision:
    """The policy, but that it refuses REFUSED tokens: vLLM lets no request in that the whole cache cannot hold."""
    rest = replace(state, waiting=tuple(w for w in state.waiting if w.prompt != REFUSED))
    decision = decide(name, rest, options)
    return replace(decision, refuse={w.id: "can never fit" for w in state.waiting if w.prompt == REFUSED})


def objectives(llm: LLM) -> list[list[float | None]]:
    """Seconds from arrival to deadline, as the policy saw them at each step, of a request that says 7 and one that says
    none: without and with an objective in the settings."""
    seen: list[set[float | None]] = []

    def noting(name: str, state: State, options: Options) -> Decision:
        found = {None if w.deadline is None else round(w.deadline - w.arrival, 6) for w in state.waiting}
        seen[-1] |= found
        return decide(name, state, options)

    two = [({"prompt_token_ids": [5] * 20}, greedy(4, extra)) for extra in ({"vlmopt_slo": 7.0}, {})]
    with patch("vlmopt.serving.scheduler.decide", noting):
        for slo in (0.0, 5.0):
            seen.append(set())
            switch(llm, policy="fcfs", slo=slo)
            run(llm, two)
    return [sorted(found, key=str) for found in seen]


def error_of(llm: LLM, **settings: Any) -> str:
    try:
        switch(llm, **settings)
    except VlmoptError as error:
        return str(error)
    return ""


def main(scheduler: str, folder: str, output: str) -> None:
    make_model(Path(folder))
    llm = LLM(
        folder,
        scheduler_cls=f"vlmopt.serving.scheduler.{scheduler}",
        additional_config={"vlmopt": {"policy": "vllm", "control": True}},
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=BLOCKS + 1,
        enable_prefix_caching=False,
        max_model_len=BLOCKS * BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        disable_log_stats=False,
    )
    result: dict[str, Any] = {"start": switch(llm)["settings"]}
    burst = requests(40)
    for name, settings in {
        "vllm": {"policy": "vllm"},
        "fcfs": {"policy": "fcfs"},
        "batch": {"policy": "batch", "batch": 4},
        "brakes": {"policy": "brakes"},
        "reserve": {"policy": "reserve"},
        "reserve_most": {"policy": "reserve", "predict": "most"},
    }.items():
        switch(llm, **settings)
        result[name] = run(llm, burst)
    result["settings"] = switch(llm, policy="reserve", predict="most")["settings"]
    # Alike but for the deadline, which is nearer the later they come; a step's budget holds no two of these prompts.
    alike = [({"prompt_token_ids": [5] * 200}, greedy(40, {"vlmopt_slo": 900.0 - 50 * i})) for i in range(12)]
    result["deadlines"] = run(llm, alike)
    refused = ({"prompt_token_ids": [7] * REFUSED}, greedy(8, {}))
    malformed = ({"prompt_token_ids": [9] * 30}, greedy(8, {"vlmopt_slo": "soon", "vlmopt_kind": ["x"]}))
    switch(llm, policy="fcfs")
    with patch("vlmopt.serving.scheduler.decide", refuse_some):  # reaches the scheduler where it is in this process
        result["odd"] = run(llm, [burst[0], refused, malformed, burst[1]])
    result["objectives"] = objectives(llm)
    result["errors"] = [error_of(llm, polici="fcfs"), error_of(llm, policy="reserv"), error_of(llm, hard="much")]
    nonsense = SamplingParams(max_tokens=1, detokenize=False, extra_args={MESSAGE: "nonsense"})
    result["errors"].append(run(llm, [({"prompt_token_ids": [0]}, nonsense)])["stop"][0])
    result["after_errors"] = switch(llm)["settings"]
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
