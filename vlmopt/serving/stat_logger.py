"""The scheduler's decisions in vLLM's log and in Prometheus: vLLM finds `AdmissionStatLogger` as a plug-in.

`pyproject.toml` names it in the group `vllm.stat_logger_plugins`, so it is loaded wherever this package is installed
beside vLLM's server; with another scheduler than ours it does nothing. The series stand at `/metrics` beside vLLM's
own, by model and engine: `vlmopt_admission_started_total`, `vlmopt_admission_held_total` by reason, and so on for each
of `admission.Counts`.
"""

from collections import Counter as Sums
from collections.abc import Iterator
from functools import cache
from typing import Any

import zmq
from prometheus_client import REGISTRY, Counter, Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vlmopt.serving.channel import Listener, address_of

logger = init_logger("vllm.vlmopt")

_PREFIX = "vlmopt_admission_"
_LABELS = ("model_name", "engine")
_SERIES = {
    "steps": "Steps scheduled",
    "decisions": "Steps in which the policy was asked",
    "started": "Requests started",
    "resumed": "Requests started again after a preemption",
    "preempted": "Preemptions",
    "finished": "Requests that ended by themselves",
    "faults": "Malformed vlmopt_ entries of requests",
    "refused": "Requests refused since they can never fit",
}


class _Export(Collector):
    """What Prometheus reads, brought up to date whenever it does."""

    def __init__(self) -> None:
        self.loggers: list[AdmissionStatLogger] = []
        plain = {name: Counter(f"{_PREFIX}{name}", says, _LABELS, registry=None) for name, says in _SERIES.items()}
        held = Counter(f"{_PREFIX}held", "Requests held back, once a step", (*_LABELS, "reason"), registry=None)
        self.counters = {**plain, "held": held}

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls this at every look, in the thread in which vLLM calls `record`."""
        for logger in self.loggers:
            logger.record()
        for counter in self.counters.values():
            yield from counter.collect()


@cache
def _export() -> _Export:
    """One for all engines of this process, since Prometheus takes no name twice."""
    export = _Export()
    REGISTRY.register(export)
    return export


class AdmissionStatLogger(AggregateStatLoggerBase):
    """Listens to the schedulers of all engines of one vLLM instance."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]):
        self._model = vllm_config.model_config.served_model_name
        self._known: dict[int, dict[str, Any]] = {}
        self._listener = None
        if not str(vllm_config.scheduler_config.scheduler_cls).startswith("vlmopt."):
            return
        try:
            self._listener = Listener(address_of(vllm_config.instance_id))
        except zmq.ZMQError as error:
            logger.warning("the admission counts of this server are not exported: %s", error)
            return
        _export().loggers.append(self)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this once a step, and the arguments say nothing of admission."""
        for engine, message in self._listener.newest().items() if self._listener else ():
            before = self._known.get(engine)
            if before is None or before["since"] != message["since"]:  # counted anew, as after a switch
                before = {"counts": {}}
            self._add(engine, _flat(message["counts"]) - _flat(before["counts"]))
            self._known[engine] = message

    def log_engine_initialized(self) -> None:
        """Say that the counts are exported."""
        if self._listener:
            logger.info("admission counts are exported as vlmopt_admission_* at /metrics")

    def log(self) -> None:
        """One line for each engine."""
        self.record()
        for engine, message in self._known.items():
            sums = _flat(message["counts"])
            held = sum(count for (name, _), count in sums.items() if name == "held")
            logger.info(
                "Engine %03d: admission by %s: %d started, %d held back in a step, %d refused, %d preempted",
                engine,
                message["policy"],
                sums["started", ""],
                held,
                sums["refused", ""],
                sums["preempted", ""],
            )

    def _add(self, engine: int, more: "Sums[tuple[str, str]]") -> None:
        for (name, reason), count in more.items():
            labels = [self._model, str(engine), *([reason] if name == "held" else [])]
            _export().counters[name].labels(*labels).inc(count)


def _flat(counts: dict[str, Any]) -> "Sums[tuple[str, str]]":
    """Counts by name and reason; refusals have a reason each, too many for a series, so they are summed."""
    flat: Sums[tuple[str, str]] = Sums()
    for name, value in counts.items():
        if name == "held":
            flat.update({(name, reason): count for reason, count in value.items()})
        else:
            flat[name, ""] += sum(value.values()) if isinstance(value, dict) else value
    return flat
