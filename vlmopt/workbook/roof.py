"""The machine's ceilings as a record wants them: measured in the same run as what is held against them."""

from typing import Any

import torch
import torch.nn.functional as F

from vlmopt.bench import roofline
from vlmopt.bench.system_info import gpu_state
from vlmopt.workbook.record import Record, Roof, measurement

PROVIDER = "torch"
VENDOR = "vendor matvec"


def measure_roof(device: torch.device | str, dtype: torch.dtype) -> Roof:
    """Read and GEMM rate of this machine, in a second or two; a decode step reads its weights and writes little."""
    read = roofline.read_rate(device).value
    gemm = roofline.gemm_rate(device, dtype=dtype).value
    return Roof(bytes_per_s=read * 1e9, flops_per_s=gemm * 1e12)


def measure_ceilings(record: Record, config: Any, device: torch.device | str, dtype: torch.dtype) -> Roof:
    """Adds copy, read-only and GEMM rates and the five matrix-vector products to the record.

    Cases: `copy`, `read`, `gemm`, and one a shape; metrics: `bandwidth` in GB/s, `gemm_rate` in TFLOP/s, `matvec_us`.

    Returns:
        read and GEMM rate, for floors.
    """
    copy, read = roofline.copy_rate(device), roofline.read_rate(device)
    gemm = roofline.gemm_rate(device, dtype=dtype)
    record.measure("copy", PROVIDER, "bandwidth", "GB/s", copy.samples)
    record.measure("read", PROVIDER, "bandwidth", "GB/s", read.samples)
    record.measure("gemm", PROVIDER, "gemm_rate", "TFLOP/s", gemm.samples)
    limit = Roof(bytes_per_s=read.value * 1e9)
    shapes = roofline.matvec_shapes(config)
    for name, rate in roofline.matvec_rates(shapes, device, dtype).items():
        rows, columns = shapes[name]
        moved = rows * columns * dtype.itemsize
        case = f"{name} {rows}x{columns}"
        record.measure(case, VENDOR, "bandwidth", "GB/s", rate.samples, bytes=moved, ceiling=limit)
        times = [moved / value / 1e3 for value in rate.samples]
        record.measure(case, VENDOR, "matvec_us", "us", times, bytes=moved, ceiling=limit)
    return Roof(bytes_per_s=read.value * 1e9, flops_per_s=gemm.value * 1e12)


def matvec_share(record: Record, config: Any) -> float:
    """Bandwidth of one decode step's matrix-vector products together, as a share of the read rate."""
    moved = 0
    for name, (rows, columns) in roofline.matvec_shapes(config).items():
        times = 1 if name == "head" else config.text_config.num_hidden_layers
        moved += times * record.find("matvec_us", VENDOR, f"{name} {rows}x{columns}")[0]["bytes"]
    return moved / matvec_step_ms(record, config) / 1e6 / record.value("bandwidth", PROVIDER, "read")


def note_state(record: Record, device: torch.device | str) -> None:
    """Puts clock, power and temperature into the record's environment; call it right after the chip was loaded."""
    record.environment.update(gpu_state(device))


def one_matvec(shape: tuple[int, int], device: torch.device | str, dtype: torch.dtype, limits: Roof) -> dict[str, Any]:
    """One matrix-vector product as a measurement, for a panel."""
    rate = roofline.matvec_rates({"chosen": shape}, device, dtype)["chosen"]
    moved = shape[0] * shape[1] * dtype.itemsize
    times = [moved / value / 1e3 for value in rate.samples]
    return measurement(f"{shape[0]}x{shape[1]}", VENDOR, "matvec_us", "us", times, bytes=moved, ceiling=limits)


def matvec_step_ms(record: Record, config: Any) -> float:
    """Time in ms of all matrix-vector products of one decode step at the measured rates."""
    total = 0.0
    for name, (rows, columns) in roofline.matvec_shapes(config).items():
        times = 1 if name == "head" else config.text_config.num_hidden_layers
        total += times * record.value("matvec_us", VENDOR, f"{name} {rows}x{columns}") / 1e3
    return total


def matvec_error(shape: tuple[int, int], device: torch.device | str, dtype: torch.dtype, seed: int) -> float:
    """Relative RMS error against float64 of the product that is timed, in units of the dtype's rounding step."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator).to(device, dtype)
    x = torch.randn(1, shape[1], generator=generator).to(device, dtype)
    exact = F.linear(x.double(), weight.double())
    error = F.linear(x, weight).double() - exact
    return (error.norm() / exact.norm()).item() / torch.finfo(dtype).eps


def matvec_bound(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """What `matvec_error` may be: half precision is summed in fp32 and rounded once, fp32 rounds at every addition."""
    return 1.0 if dtype.itemsize == 2 else shape[1] ** 0.5


def add_floors(record: Record, case: str, config: Any, grid: tuple[int, int, int], tokens: int, roof: Roof) -> None:
    """Adds the floor of the first token and of a decode step as the provider `floor`."""
    ttft = roofline.prefill_floor_ms(config, tokens, grid, tflop_per_s=roof.flops_per_s / 1e12)
    decode = roofline.decode_floor_ms(config, tokens, gb_per_s=roof.bytes_per_s / 1e9)
    record.measure(case, "floor", "ttft_ms", "ms", [ttft])
    record.measure(case, "floor", "decode_ms_per_token", "ms", [decode])
