"""One vLLM engine in processes of its own; the only part of the evaluation that knows vLLM."""

import dataclasses
import difflib
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.version import __version__

from vlmopt.errors import VlmoptError
from vlmopt.serving.drive import EngineDied, Piece, Refused
from vlmopt.serving.scheduler import control_params, reply_of
from vlmopt.serving.workload import Request

_FIRST_ID = 10  # prompts of a length alone are drawn from here on: the first ids are often special
_QUEUE_FULL = ("QueueOverflowError", "MaxQueuedTokensError")  # vLLM 0.26 has neither


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what vLLM's engine does not know, before anything is started.

    Raises:
        VlmoptError: an unknown argument or attention backend, the nearest is named; or data parallelism.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, 0)[0]
            raise VlmoptError(f"vLLM {__version__} has no engine argument {name!r}; the nearest is {nearest!r}")
    backend, backends = arguments.get("attention_backend"), list(AttentionBackendEnum.__members__)
    if backend is not None and backend not in backends:
        nearest = difflib.get_close_matches(backend, backends, 1, 0)[0]
        raise VlmoptError(f"vLLM {__version__} has no attention backend {backend!r}; the nearest is {nearest!r}")
    if arguments.get("data_parallel_size", 1) != 1:
        raise VlmoptError(
            "an evaluation switches the policy of one scheduler, and data parallelism has several: leave "
            "data_parallel_size out here; ./run.sh serve takes it"
        )


class Load(StatLoggerBase):
    """What the scheduler said of itself last."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0):
        self.now = {"kv_cache_usage": 0.0, "running": 0, "waiting": 0, "preemptions": 0}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this once a step."""
        if scheduler_stats is not None:
            self.now["kv_cache_usage"] = scheduler_stats.kv_cache_usage
            self.now["running"] = scheduler_stats.num_running_reqs
            self.now["waiting"] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            self.now["preemptions"] += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class Engine:
    """A started engine.

    Args:
        arguments: vLLM's engine arguments.
        max_tokens: of an answer.
        hidden: each answer ends at its request's `output_tokens`, which the policy does not see, instead of by itself.

    Raises:
        VlmoptError: it did not start, with vLLM's first words about it.
    """

    def __init__(self, arguments: Mapping[str, Any], max_tokens: int, hidden: bool):
        self.max_tokens, self.hidden = max_tokens, hidden
        self._messages = 0
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[self._watch])
        except Exception as error:  # whatever is wrong with a model, its arguments or the device ends here
            raise VlmoptError(f"vLLM did not start the engine: {_first_line(error)}") from error
        config = self._llm.vllm_config
        self._by_priority = config.scheduler_config.policy == "priority"
        self._vocabulary = config.model_config.get_vocab_size()
        self._tokenizer = None if config.model_config.skip_tokenizer_init else self._llm.get_tokenizer()

    async def ask(self, request: Request) -> AsyncIterator[Piece]:
        """Send a request; pieces come as the engine makes them.

        Raises:
            Refused: by the policy or by a full queue, with the reason.
            EngineDied: the engine has ended.
        """
        params = self._params(request)
        priority = round(1e3 * request.deadline()) if self._by_priority and request.slo else 0
        with _alive():
            try:
                async for out in self._llm.generate(self._prompt(request), params, request.id, priority=priority):
                    answer = out.outputs[0]
                    if answer.finish_reason == "abort":
                        raise Refused(answer.stop_reason or "ended by the engine")
                    yield Piece(len(answer.token_ids), answer.text, len(out.prompt_token_ids))
            except Exception as error:
                if type(error).__name__ in _QUEUE_FULL:
                    raise Refused("the queue is full") from error
                raise

    async def switch(self, **settings: Any) -> dict[str, Any]:
        """Change the scheduler's settings (none: only ask); its counts and settings until now.

        Raises:
            VlmoptError: a bad setting.
            EngineDied: the engine has ended.
        """
        self._messages += 1
        name, params = f"message-{self._messages}", control_params(**settings)
        with _alive():
            async for out in self._llm.generate({"prompt_token_ids": [0]}, params, name):
                last = out
        return reply_of(last)

    async def memory(self, restart: bool = False) -> dict[str, Any]:
        """The device and the peak of memory in bytes over all workers; `worker.Gauge` says what that is."""
        with _alive():
            said = await self._llm.collective_rpc("vlmopt_memory", args=(restart,))
        return {"device": said[0]["device"], "peak": sum(worker["peak"] for worker in said)}

    async def environment(self) -> dict[str, Any]:
        """Of the first worker, as a record holds it, and vLLM's version."""
        with _alive():
            said = await self._llm.collective_rpc("vlmopt_environment")
        return {**said[0], "vllm": __version__}

    def load(self) -> dict[str, float]:
        """Share of the KV cache in use, running and waiting requests, preemptions since the start."""
        return dict(self._load.now)

    def versions(self) -> dict[str, str]:
        """Of what answers."""
        return {"vllm": __version__, "torch": torch.__version__}

    def stop(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()

    def _watch(self, vllm_config: VllmConfig, engine_index: int) -> Load:
        self._load = Load(vllm_config, engine_index)
        return self._load

    def _params(self, request: Request) -> SamplingParams:
        extra: dict[str, Any] = {"vlmopt_kind": request.kind}
        if request.slo is not None:
            extra["vlmopt_slo"] = request.slo
        if self.hidden:
            extra["vlmopt_max_tokens"] = max(self.max_tokens, request.output_tokens)
        return SamplingParams(
            temperature=0,
            max_tokens=request.output_tokens if self.hidden else self.max_tokens,
            ignore_eos=self.hidden,
            detokenize=self._tokenizer is not None and not self.hidden,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )

    def _prompt(self, request: Request) -> dict[str, Any]:
        if request.prompt is None:
            ids = random.Random(request.id).choices(range(_FIRST_ID, self._vocabulary), k=request.prompt_tokens)
            return {"prompt_token_ids": ids}
        if self._tokenizer is None:
            raise VlmoptError("this engine has no tokenizer and takes prompts of a length alone")
        text = {"type": "text", "text": request.prompt}
        image = () if request.image is None else ({"type": "image"},)
        written = self._written([*image, text] if image else request.prompt)
        if not image:
            return {"prompt_token_ids": self._tokenizer.encode(written, add_special_tokens=False)}
        return {"prompt": written, "multi_modal_data": {"image": _open(request.image)}}

    def _written(self, content: Any) -> str:
        """The prompt as the model's chat template writes it; a text alone where there is no template."""
        if getattr(self._tokenizer, "chat_template", None) is None and isinstance(content, str):
            return content
        messages = [{"role": "user", "content": content}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise EngineDied("the engine died; its last words stand in the log above") from error


def _open(path: str | Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _first_line(error: BaseException) -> str:
    said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return (said.strip() or type(error).__name__).split("\n")[0]
