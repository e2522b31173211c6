"""One request at a time in vLLM: what the first token and each further one take, for a comparison with one stream.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m vlmopt.serving.alone FOLDER --output FILE [--engine JSON]

FOLDER holds a Qwen3-VL's configuration and tokenizer; its weights are random. The engine stands in this process where
vLLM's switch says so, as above, and only there can the time be taken in which the GPU works. Images differ from call to
call, nothing is kept between calls, and tokens are not turned into text.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.version import __version__

from vlmopt.bench.system_info import environment
from vlmopt.files import write_atomic

SCHEMA = 1
CASE = "random-2b 768x1024"
HEIGHT, WIDTH, QUESTION = 768, 1024, "What is written here?"
TOKENS, MORE = 128, 64  # of an answer; of the answer whose work on the GPU is summed
FIRSTS, ANSWERS, WARM = 15, 9, 4
SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 1,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.5,
}

Ask = Callable[[int], Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the result file, and print a line of it."""
    options = _parser().parse_args(arguments)
    settings = {**SETTINGS, **options.engine}
    begin = time.perf_counter()
    llm = LLM(model=str(options.folder), **settings)
    started = time.perf_counter() - begin
    result = {"schema": SCHEMA, "case": CASE, "settings": settings, "start_s": started, **measure(asker(llm))}
    result["async_scheduling"] = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    result["in_process"] = hasattr(llm.llm_engine.engine_core, "engine_core")
    result["environment"] = {**environment(), "vllm": __version__}
    _write(options.output, result)
    if result["in_process"]:
        result["gpu_ms_per_token"] = gpu_ms_per_token(asker(llm, seed=1))
        _write(options.output, result)
    first, whole = statistics.median(result["ttft_ms"]), statistics.median(result["total_ms"])
    print(
        f"first token {first:.1f} ms, then {(whole - first) / (TOKENS - 1):.3f} ms a token; "
        f"the GPU works {result.get('gpu_ms_per_token') or float('nan'):.3f} ms of these"
    )
    return 0


def asker(llm: LLM, seed: int = 0) -> Ask:
    """What asks for so many tokens about a new image, and returns vLLM's output."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    written = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pixels = np.random.default_rng(seed)

    def ask(tokens: int) -> Any:
        image = Image.fromarray(pixels.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt = {"prompt": written, "multi_modal_data": {"image": image}}
        return llm.generate(prompt, params, use_tqdm=False)[0]

    return ask


def measure(ask: Ask) -> dict[str, Any]:
    """Milliseconds of whole calls for one token and for TOKENS, preprocessing included."""
    for _ in range(WARM):
        ask(TOKENS)
    ttft, total = [], []
    for number in range(FIRSTS):
        ttft.append(_timed(ask, 1)[0])
        if number < ANSWERS:
            milliseconds, output = _timed(ask, TOKENS)
            total.append(milliseconds)
    tokens = len(output.outputs[0].token_ids)
    if tokens != TOKENS:
        raise RuntimeError(f"vLLM gave {tokens} tokens where {TOKENS} were asked for")
    return {"prompt_tokens": len(output.prompt_token_ids), "tokens": TOKENS, "ttft_ms": ttft, "total_ms": total}


def gpu_ms_per_token(ask: Ask) -> float:
    """Milliseconds in which the GPU works on each token after the first, by the profiler's count of its kernels."""
    return (_gpu_ms(ask, 1 + MORE) - _gpu_ms(ask, 1)) / MORE


def _write(path: Path, result: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(result, indent=1) + "\n")


def _gpu_ms(ask: Ask, tokens: int) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ask(tokens)
        torch.cuda.synchronize()
    events = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(event.time_range.end - event.time_range.start for event in events) / 1e3


def _timed(ask: Ask, tokens: int) -> tuple[float, Any]:
    begin = time.perf_counter()
    output = ask(tokens)
    return 1e3 * (time.perf_counter() - begin), output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vlmopt.serving.alone", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="of the result, JSON")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of the engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
