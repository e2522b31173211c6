"""What the evaluation asks vLLM's worker processes (`--worker-extension-cls vlmopt.serving.worker.Gauge`)."""

import json
import platform
import resource
from typing import Any

import torch

from vlmopt.bench.system_info import environment


class Gauge:
    """Adds two methods to vLLM's worker, for `collective_rpc`."""

    def vlmopt_environment(self) -> dict[str, Any]:
        """What runs here, on which device, in which state: the environment of a record, in plain types that travel."""
        return json.loads(json.dumps(environment()))

    def vlmopt_memory(self, restart: bool) -> dict[str, Any]:
        """The device's name and the peak of memory in bytes, counted anew from here on with `restart`.

        On a GPU: what torch's allocator has held of the device, KV cache included. On a CPU: resident memory of the
        worker process since its start, which cannot be counted anew.
        """
        if not torch.cuda.is_available():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {"device": platform.processor() or platform.machine(), "peak": peak}
        peak = torch.cuda.max_memory_reserved()
        if restart:
            torch.cuda.reset_peak_memory_stats()
        return {"device": torch.cuda.get_device_name(), "peak": peak}
