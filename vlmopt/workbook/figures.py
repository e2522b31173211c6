"""Which figures belong to which notebook: one entry a slug, each figure a pure function of the record."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from vlmopt.workbook import ablation, decode_study, plots, serving_plots, speculation_study
from vlmopt.workbook.record import Record

FIRST_TOKEN = (
    ("ttft_vision_ms", "vision"),
    ("ttft_text_ms", "text"),
    ("ttft_head_ms", "head"),
    ("ttft_rest_ms", "rest"),
)
DECODE = (("decode_text_ms", "text"), ("decode_head_ms", "head"), ("decode_rest_ms", "rest"))
BUSY = (
    ("first token", (("ttft_ms", "whole call"), ("ttft_busy_ms", "device busy"))),
    ("decode step", (("decode_ms_per_token", "whole step"), ("decode_busy_ms", "device busy"))),
)
SPEED = (
    ("ttft_ms", "first token"),
    ("ttft_with_preprocessing_ms", "with preprocessing"),
    ("decode_ms_per_token", "decode, per token"),
    ("tokens_per_s", "over 128 tokens"),
)
CACHE = (("live_mb", "live rows, MB"), ("capacity_mb", "capacity, MB"), ("grow_ms", "growth, ms"))
STRUCTURE = (
    ("parameters", "parameters"),
    ("first_token_flops", "FLOPs to the first token"),
    ("decode_bytes", "bytes a decode step"),
)

LOADS = ("8B load 0.5", "8B load 0.9", "8B load 1.3")
OVERLOAD = LOADS[-1]
SERVING = (
    ("slo_attainment_rate", "share of the objectives met"),
    ("mean_latency_s", "mean latency, s"),
    ("preemptions", "preemptions a run"),
)

Draw = Callable[[Record], Figure]


def _profile(record: Record) -> Figure:
    groups = [("first token", FIRST_TOKEN), ("decode step", DECODE)]
    return plots.stacked(record, groups, "stock", plots.main_case(record))


def _kernels(record: Record) -> Figure:
    case = f"{plots.main_case(record)} first token"
    return plots.ranking(record, "kernel_ms", case, case)


def _busy(record: Record) -> Figure:
    return plots.pairs(record, BUSY, "stock", plots.main_case(record))


def _ceilings(record: Record) -> Figure:
    return plots.ceilings(record, "bandwidth", ceiling="torch")


def _accuracy(record: Record) -> Figure:
    return plots.ranking(record, "accuracy", None, "exact answers by kind of question")


def _training(record: Record) -> Figure:
    return plots.curve(record, [("loss", "loss"), ("train_exact", "exact answers, held-out strings")], "step")


def _end_to_end(record: Record) -> Figure:
    return plots.metrics(record, [*SPEED, ("peak_memory_gb", "peak memory")], plots.main_case(record))


def _steps(record: Record) -> Figure:
    return plots.ladder(record, "step_ms", plots.main_case(record), decode_study.predicted, "a decode step")


def _build_up(record: Record) -> Figure:
    title = "a further token, from stock up"
    return plots.ladder(record, "decode_ms_per_token", plots.main_case(record), ablation.predicted, title)


def _lost(metric: str, title: str) -> Draw:
    return lambda record: plots.ranking(record, metric, None, title)


def _timeline(record: Record) -> Figure:
    return plots.timeline(record, record.config["timeline"], "the middle of one decode step")


def _attainment(record: Record) -> Figure:
    return serving_plots.over_load(record, SERVING, ("fcfs", "vllm", "reserve"))


def _gain(record: Record) -> Figure:
    return serving_plots.over_load(record, [("attainment_gain", "points above plain vLLM")], ("reserve",))


def _kernel(op: str) -> Draw:
    """Latency and roofline share over the cases of one of a record's kernels."""

    def draw(record: Record) -> Figure:
        own = [row for row in record.measurements if row["case"].startswith(f"{op} ")]
        own = [{**row, "case": row["case"].removeprefix(f"{op} ")} for row in own]
        return plots.latency_and_share(replace(record, measurements=own), "us")

    return draw


def _quantised(record: Record) -> Figure:
    bytes_read = "bytes_per_token", "bytes of weights a decode step reads, of the embedded model"
    return plots.scatter(record, bytes_read, ("accuracy", "accuracy"), "what quantised copies cost")


FIGURES: dict[str, dict[str, tuple[str, Draw]]] = {
    "10_model_structure": {"": ("parameters", lambda record: plots.shares(record, STRUCTURE))},
    "11_baseline_profile": {
        "": ("ttft_vision_ms", _profile),
        "_busy": ("ttft_busy_ms", _busy),
        "_kernels": ("kernel_ms", _kernels),
    },
    "12_roofline": {"": ("bandwidth", _ceilings)},
    "13_tiny_model": {"": ("accuracy", _accuracy), "_training": ("loss", _training)},
    "22_decode_attention": {"": ("us", _kernel("decode_attention_live"))},
    "23_gemv": {"": ("us", _kernel("gemv"))},
    "25_lm_head": {"": ("us", _kernel("lm_head_argmax")), "_logits": ("us", _kernel("lm_head_logits"))},
    "26_vision_kernels": {
        "": ("us", _kernel("vision_rotary")),
        "_layer_norm": ("us", _kernel("add_layer_norm")),
        "_gelu": ("us", _kernel("bias_gelu")),
        "_patch_embed": ("us", _kernel("patch_embed")),
        "_attention": ("us", _kernel("vision_attention")),
        "_tower": ("tower_ms", lambda record: plots.ranking(record, "tower_ms", None, "the whole vision tower")),
    },
    "30_static_cache": {"": ("grow_ms", lambda record: plots.curve(record, CACHE, "positions"))},
    "31_decode_graph": {"": ("step_ms", _steps), "_timeline": ("step_ms", _timeline)},
    "60_ablation": {
        "": ("decode_ms_per_token", _build_up),
        "_decode_lost": ("decode_lost_ms", _lost("decode_lost_ms", "lost a further token")),
        "_ttft_lost": ("ttft_lost_ms", _lost("ttft_lost_ms", "lost to the first token")),
    },
    "33_cpp_runtime": {
        "": ("unseen_ms", lambda record: plots.ordered(record, "unseen_ms", "first calls at sizes never seen", "ms")),
    },
    "34_preprocessing": {
        "": ("preprocessing_ms", lambda record: plots.latency_and_share(record, "preprocessing_ms")),
        "_steps": ("step_ms", lambda record: plots.ranking(record, "step_ms", None, "stock's steps, in ms")),
    },
    "41_speculative_decoding": {"": ("speedup_of_verifying", speculation_study.figure)},
    "40_quantization": {"": ("bytes_per_token", _quantised)},
    "50_serving_baseline": {
        "": ("slo_attainment_rate", _attainment),
        "_latency": ("latency_s", lambda record: serving_plots.distribution(record, LOADS, ("fcfs",))),
        "_course": ("kv_occupancy", lambda record: serving_plots.course(record, OVERLOAD)),
    },
    "51_admission_control": {
        "": ("slo_attainment_rate", lambda record: serving_plots.contest(record, SERVING, OVERLOAD)),
        "_load": ("slo_attainment_rate", _attainment),
        "_latency": ("latency_s", lambda record: serving_plots.distribution(record, LOADS, ("fcfs", "reserve"))),
        "_course": ("kv_occupancy", lambda record: serving_plots.course(record, OVERLOAD)),
        "_boundary": ("attainment_gain", _gain),
    },
    "52_kv_cache_fp8": {"": ("slo_attainment_rate", _attainment)},
    "61_end_to_end": {"": ("ttft_ms", _end_to_end)},
}
"""A slug's figures by the suffix of their file's name, each with the metric without which it is left out; a notebook
that lists none gets `latency_and_share` of its first time."""


def stems(record: Record) -> list[str]:
    """File stems of the record's figures."""
    return list(_known(record))


def of(record: Record) -> dict[str, Figure]:
    """The record's figures by file stem; those whose metric was not measured are left out."""
    return {stem: draw(record) for stem, draw in _known(record).items()}


def _known(record: Record) -> dict[str, Draw]:
    listed = FIGURES.get(record.slug, _default(record))
    return {record.slug + suffix: draw for suffix, (metric, draw) in listed.items() if record.find(metric)}


def _default(record: Record) -> dict[str, tuple[str, Draw]]:
    times = (row["metric"] for row in record.measurements if row["unit"] in ("us", "ms", "s"))
    first = next((metric for metric in times if metric != "draft_us"), "")  # drafts are timed before the winner
    return {"": (first, lambda r: plots.latency_and_share(r, first))}


def draw(record: Record, folder: Path) -> list[Path]:
    """Writes the record's figures as .svg and .png into `folder`, beside the record."""
    return [path for stem, figure in of(record).items() for path in plots.save(figure, Path(folder) / stem)]
