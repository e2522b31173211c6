"""A decode step, built up one change at a time from the references in a captured graph to one launch for all of it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

import vlmopt
from vlmopt.bench import models, roofline
from vlmopt.bench.timing import interleave_series, loop_time, timed
from vlmopt.kernels import decode_layer, decode_persistent, oracle
from vlmopt.kernels.decode_persistent import Buffers, DecodePersistent, Layer, Model, decode_persistent_ref
from vlmopt.ops import KERNELS, Ops, launcher
from vlmopt.runtime.cache import KVCache, bucket
from vlmopt.runtime.generate import ENGINES, STEPS_AT_ONCE
from vlmopt.runtime.graphs import DecodeGraphs
from vlmopt.stages.decode import attention, decode_step, layer_tensors
from vlmopt.stages.tables import rope
from vlmopt.weights import TextWeights, collect
from vlmopt.workbook import gemv_study, plots, text_study
from vlmopt.workbook.kernel_study import Bench
from vlmopt.workbook.profiling import short_name
from vlmopt.workbook.record import Record, Roof, measurement

REFERENCES, LAYERS, WHOLE = "references", "five launches a layer", "one launch"
RUNGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        REFERENCES: (),
        "+ attention over the live length": ("decode_attention_live",),
        "+ norms, rope, activation": ("add_rms_norm", "qkv_norm_rope_cache", "swiglu", "merge_embeddings"),
        "+ products": ("linear", "linear_swiglu"),
        "+ head": ("lm_head_argmax",),
        LAYERS: ("decode_layer",),
        WHOLE: ("decode_step",),
    }
)
"""What each rung adds to those before it."""
PREDICTED_MS = MappingProxyType(dict(zip(RUNGS, (4.5, 4.2, 1.75, 1.35, 1.3, 1.06, 1.1), strict=True)))
"""Of the 2B shapes after 800 tokens on an H200. References: as others measured plain operations in a graph. Then what
28 layers save: 10 µs of masked attention each, 90 of small operations, what cuBLAS takes above the time of its bytes.
Five launches: 30 µs of products and 4 of attention a layer, and 140 for the head."""
METRIC = "step_ms"
FLAT_STEPS, FLAT = 1000, 1.5
ROWS_FREE = 1100
"""Cache rows kept free behind the longest position, for steps that are timed one after the other."""


def tables() -> dict[str, Ops]:
    """The table of ops of every rung; entries that cover others leave them in place."""
    found, names = {}, ()
    launchers = {"decode_step": decode_persistent.launch, **{name: launcher(name) for name in KERNELS}}
    for rung, added in RUNGS.items():
        names += added
        chosen = [name for name in names if rung != WHOLE or name != "decode_layer"]
        found[rung] = Ops(**{name: launchers[name] for name in chosen})
    return found


@dataclass(frozen=True)
class Stairs:
    """A model's decode step by rung, captured over one cache."""

    name: str
    weights: TextWeights
    config: Any
    """Of the transformers model, for bytes and FLOPs."""
    graphs: Mapping[str, DecodeGraphs]
    cache: KVCache
    rope_table: tuple[Tensor, Tensor]

    def graph(self, rung: str, row: int, steps: int = STEPS_AT_ONCE) -> torch.cuda.CUDAGraph:
        """The captured steps of a rung, set to go on from cache row `row`."""
        graphs = self.graphs[rung]
        graph = graphs.get(bucket(row + ROWS_FREE), self.rope_table, steps=steps)
        graphs.row.fill_(row)
        return graph

    def series(self, rung: str, row: int, replays: int) -> list[float]:
        """Milliseconds a step, one value a replay, each behind the one before without a pause."""
        graph = self.graph(rung, row)
        return [ms / STEPS_AT_ONCE for ms in _between(graph, 1, replays)]


def _between(graph: torch.cuda.CUDAGraph, warm: int, replays: int) -> list[float]:
    """Milliseconds from each of `replays` replays, queued one behind the other, to the next."""
    for _ in range(warm):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def stairs(loaded: models.Loaded, longest: int, rungs: Sequence[str] = tuple(RUNGS)) -> Stairs:
    """Packs the model's products and prepares these rungs over a cache for `longest` positions; a GPU is needed."""
    weights = collect(loaded.model, packed=True).text
    cache = KVCache(weights)
    with torch.no_grad():
        cache.reserve(longest + ROWS_FREE)
        cache.buffer.normal_()
        positions = torch.arange(cache.capacity, device=weights.embed.device).expand(3, -1)
        table = rope(positions, weights, weights.embed.dtype)
    graphs = {rung: DecodeGraphs(weights, ops, cache) for rung, ops in tables().items() if rung in rungs}
    for each in graphs.values():
        each.forget()
    return Stairs(loaded.name, weights, loaded.model.config, graphs, cache, table)


def measure_steps(record: Record, subject: Stairs, positions: Sequence[int], roof: Roof, rounds: int = 4) -> None:
    """Adds `step_ms` of every rung at every number of live positions, in the order A B B A."""
    for row in tqdm(positions, desc="decode steps", leave=False):
        moved = roofline.decode_bytes(subject.config, row)
        runs = {rung: partial(subject.series, rung, row, 8) for rung in subject.graphs}
        with torch.no_grad():
            for rung, values in interleave_series(runs, rounds).items():
                record.measure(at(subject.name, row), rung, METRIC, "ms", values, bytes=moved, ceiling=roof)


def at(name: str, row: int) -> str:
    """A case's name."""
    return f"{name} at {row:,}"


def measure_on_cpu(record: Record, loaded: models.Loaded, bench: Bench, seed: int) -> str:
    """Adds `step_ms` of the references, called one after the other; the case's name."""
    record.skip("the rungs above the references", "there is no GPU; their kernels run on one only")
    subject = text_study.prompt(loaded, 110, 60, seed)
    subject.prefill(Ops())
    case = at(loaded.name, 110)
    moved = roofline.decode_bytes(loaded.model.config, 110, weight_bytes=bench.dtype.itemsize)
    times = loop_time([partial(gemv_study.step, subject, Ops())], rounds=20, device=bench.device)
    record.measure(case, REFERENCES, METRIC, "ms", times, bytes=moved, ceiling=bench.roof)
    return case


def checks(loaded: models.Loaded, bench: Bench, seed: int) -> list[tuple[str, str, float, float]]:
    """What `Record.check` takes: every rung's error in the last hidden row of a step of the embedded model.

    In half precision relative RMS errors against float64, in units of the references' own; in fp32 on a CPU the values
    that differ between the references and the covering entry's.
    """
    subject = text_study.prompt(loaded, 110, 60, seed)
    subject.prefill(Ops())
    model, buffers = _persistent(subject)
    own = decode_persistent_ref(model, _copied(buffers))
    if not bench.on_gpu:
        covered = _hidden(subject, Ops(decode_layer=decode_layer.decode_layer_ref))
        differing = (covered != _hidden(subject, Ops())).sum().item() + (covered != own).sum().item()
        return [("decode_layer's reference: values that differ from the entries it covers", "exact", differing, 0)]
    wide = Model(*oracle.widen(list(model))), Buffers(*oracle.widen(list(_copied(buffers))))
    truth = decode_persistent_ref(*wide)
    unit = (own.double() - truth).norm()
    rows = []
    for rung, ops in tables().items():
        h = _whole(model, buffers) if rung == WHOLE else _hidden(subject, ops)
        error = ((h.double() - truth).norm() / unit).item()
        rows.append((f"{rung}: RMS error of the last hidden row / the references'", "near", error, oracle.RMS_BOUND))
    return rows


def _persistent(subject: text_study.Prompt) -> tuple[Model, Buffers]:
    """The prompt's model and the state before its next token, as the one-launch kernel takes them."""
    weights, length, device = subject.weights, subject.ids.shape[0], subject.ids.device
    first = weights.layers[0]
    layers = [Layer(*layer_tensors(layer)) for layer in weights.layers]
    eps = first.input_norm.eps, first.q_norm.eps
    model = Model(layers, weights.embed, weights.norm.weight, weights.head.weight, *subject.angles, *eps)
    row, delta = (torch.tensor([value], device=device) for value in (length, 0))
    history = torch.zeros(length + 2, dtype=torch.int64, device=device)
    return model, Buffers(subject.cache, subject.ids[:1].clone(), row, delta, history)


def _copied(buffers: Buffers) -> Buffers:
    return Buffers(*(tensor.clone() for tensor in buffers))


@torch.no_grad()
def _hidden(subject: text_study.Prompt, ops: Ops) -> Tensor:
    """The last hidden row [hidden] of the prompt's next step."""
    length = subject.ids.shape[0]
    row = torch.full((1,), length, device=subject.ids.device)
    angles, cache = tuple(table[length:] for table in subject.angles), subject.cache.clone()
    attend = attention(row, cache, ops, may_wait=True)
    return decode_step(subject.ids[:1], angles, cache, row, attend, subject.weights, ops)[0]


def _whole(model: Model, buffers: Buffers) -> Tensor:
    step = DecodePersistent(model, _copied(buffers))
    step.step()
    return step.h


def same_ids(subject: Stairs, row: int, steps: int = 64) -> int:
    """How many ids of `steps` steps differ between single replays and several steps in one graph, over all rungs."""
    differing = 0
    for rung, graphs in subject.graphs.items():
        found = []
        for at_once in (1, STEPS_AT_ONCE):
            graphs.token.fill_(7)
            graph = subject.graph(rung, row, at_once)
            for _ in range(steps // at_once):
                graph.replay()
            found.append(graphs.history[row + 1 : row + 1 + steps].clone())
        differing += (found[0] != found[1]).sum().item()
    return differing


def measure_flatness(record: Record, subject: Stairs, rung: str, row: int) -> None:
    """Adds the share of 1,000 single steps, queued one behind the other, that take at most 1.5 times their median."""
    times = _between(subject.graph(rung, row, 1), 4, FLAT_STEPS)
    median = sorted(times)[len(times) // 2]
    case = f"{at(subject.name, row)}, {FLAT_STEPS:,} single steps"
    record.measure(case, rung, "single_step_ms", "ms", times)
    record.measure(case, rung, "flat_share", "share", [sum(t <= FLAT * median for t in times) / len(times)])


def measure_wall(record: Record, loaded: models.Loaded, prompt: int, seed: int, rounds: int = 5) -> None:
    """Adds what a token costs in `generate` (`wall_ms`) and in bare replays of the same graphs (`bare_ms`)."""
    model, tokens = loaded.model, 128
    generator = torch.Generator().manual_seed(seed)
    # of the embedded tokenizer's letters: another id may stand for an image, without which stock takes the call
    ids = torch.randint(20, 200, (1, prompt), generator=generator).to(loaded.device)
    vlmopt.optimize(model, "fast")
    engine = ENGINES[model]

    def call(new: int) -> float:
        options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None}
        return timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options), loaded.device)[1]

    def bare() -> float:
        graph = engine.graphs.get(bucket(prompt + tokens), engine.rope_table, steps=STEPS_AT_ONCE)
        engine.graphs.row.fill_(prompt)

        def replay() -> None:
            for _ in range(tokens // STEPS_AT_ONCE):
                graph.replay()

        return timed(replay, loaded.device)[1] / tokens

    call(tokens)
    case = f"{at(loaded.name, prompt)}, {tokens} tokens"
    pairs = [((call(1 + tokens) - call(1)) / tokens, bare()) for _ in range(rounds)]
    record.check("fast: calls of this measurement handed to stock", "near", vlmopt.status(model).calls["stock"], 0)
    vlmopt.revert(model)
    for name, values in zip(("wall_ms", "bare_ms"), zip(*pairs, strict=True), strict=True):
        record.measure(case, "fast", name, "ms", values)


def timeline(run: Callable[[], Any], device: torch.device, first: int, count: int) -> list[list[Any]]:
    """[name, start, end] in µs of `count` launches from the `first` on (on a CPU: of operators), as the profiler sees
    them; time starts with the first of them."""
    run()
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == kind and (on_cuda or e.cpu_parent is None)]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)[first : first + count]
    start = spans[0][0] if spans else 0.0
    return [[short_name(name), round(a - start, 2), round(b - start, 2)] for a, b, name in spans]


def measure_timeline(record: Record, subject: Stairs | None, loaded: models.Loaded, seed: int) -> None:
    """Adds to the record's config the `timeline` of about two layers in the middle of a step.

    On a GPU of one replay with five launches a layer, on a CPU of the references' operators.
    """
    if subject is not None:
        graph = subject.graph(LAYERS, 800, 1)
        record.config["timeline"] = timeline(graph.replay, subject.cache.buffer.device, 60, 11)
        return
    prompt = text_study.prompt(loaded, 110, 60, seed)
    run = partial(gemv_study.step, prompt, Ops())
    record.config["timeline"] = timeline(run, prompt.ids.device, 40, 30)


def predicted(rung: str, case: str) -> str:
    """The name of a rung's prediction."""
    return f"{rung}, {case}"


def settle(record: Record, case: str, metric: str = METRIC, predicted: Callable[[str, str], str] = predicted) -> None:
    """Puts the medians of one metric beside what was predicted under the name `predicted(provider, case)`."""
    known = {entry["what"] for entry in record.predictions}
    for row in record.find(metric, case=case):
        if predicted(row["provider"], case) in known:
            record.settle(predicted(row["provider"], case), row["p50"])


def kept(record: Record, case: str, table: Sequence[dict[str, Any]]) -> str:
    """Of the two rivals the one for the table of ops: the one that is faster wherever both were measured, whatever its
    further positions cost; else the faster one at `case` of those whose further positions cost what `extra` allows."""
    times = {(row["provider"], row["case"]): row["p50"] for row in record.find(METRIC)}
    cases = {at for _, at in times}
    for one, other in ((LAYERS, WHOLE), (WHOLE, LAYERS)):
        if all(times[one, at] < times[other, at] for at in cases):
            return one
    above = {row["step"] for row in table if row["stands"] != "good"}
    able = [rung for rung in (LAYERS, WHOLE) if rung not in above] or [LAYERS, WHOLE]
    return min(able, key=lambda rung: record.value(METRIC, rung, case))


def lose(record: Record, case: str, table: Sequence[dict[str, Any]]) -> None:
    """Keeps the rival that is not `kept`, and every rung that gave nothing over the one before it."""
    rows = record.find(METRIC, case=case)
    times = {row["provider"]: row["p50"] for row in rows}
    if {LAYERS, WHOLE} <= set(times):
        winner = kept(record, case, table)
        loser = WHOLE if winner == LAYERS else LAYERS
        lesson = f"{plots.number(times[loser])} ms a step against {plots.number(times[winner])} ({case})"
        if times[loser] < times[winner]:
            lesson += ", but further positions cost it more than their bytes"
        record.lose(loser, lesson)
    for before, after in itertools.pairwise([rung for rung in times if rung not in (LAYERS, WHOLE)]):
        if times[after] > times[before]:
            record.lose(after, f"{plots.number(times[after])} ms a step after {plots.number(times[before])} ({case})")


def extra(record: Record, name: str, positions: Sequence[int], copy_rate: float) -> list[dict[str, Any]]:
    """What a step takes longer at more live positions than at the first, beside what is allowed: the extra keys' and
    values' bytes at 75 % of the copy rate (bytes/s)."""
    table = []
    for row in record.find(METRIC):
        base = [m for m in record.find(METRIC, row["provider"], at(name, positions[0])) if m is not row]
        if row["case"] in [at(name, p) for p in positions[1:]] and base:
            more = row["bytes"] - base[0]["bytes"]
            took, allowed = row["p50"] - base[0]["p50"], 1e3 * more / (0.75 * copy_rate)
            told = {"step": row["provider"], "case": row["case"], "extra ms": took, "allowed": allowed}
            table.append({**told, "stands": "good" if took <= allowed else "above what its bytes allow"})
    return table


def conclude(record: Record, case: str, table: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Answer and verdict from the record and from what `extra` found."""
    n = plots.number
    rows = {row["provider"]: row for row in record.find(METRIC, case=case)}
    if WHOLE not in rows:
        answer = (
            f"On this CPU the references take {n(rows[REFERENCES]['p50'])} ms a step; what kernels and graphs make "
        )
        return answer + "of it shows on a GPU only.", "Right, as far as a CPU can tell; no speed is claimed from here."
    best = min((LAYERS, WHOLE), key=lambda rung: rows[rung]["p50"])
    other = WHOLE if best == LAYERS else LAYERS
    share = 100 * rows[best]["roofline_share"]
    answer = (
        f"{best[0].upper()}{best[1:]}: {n(rows[best]['p50'])} ms a step ({case}), {share:.0f} % of the read rate, "
        f"against {n(rows[other]['p50'])} for {other} and {n(rows[REFERENCES]['p50'])} for the captured references."
    )
    winner = kept(record, case, table)
    behind = [row for row in table if row["stands"] != "good" and row["step"] in (LAYERS, WHOLE)]
    faults = [f"{row['step']}, {row['case']}: {row['stands']}" for row in behind]
    faults += [
        f"{share['provider']}: only {share['p50']:.1%} of single steps lie within {FLAT} medians"
        for share in record.find("flat_share")
        if share["p50"] < 0.999
    ]
    if not faults:
        return answer, f"{best} wins; more positions cost what their bytes do."
    return answer, f"{winner[0].upper()}{winner[1:]} is what the table of ops has. But {'; '.join(faults)}."


def one(subject: Stairs | None, loaded: models.Loaded, bench: Bench, rung: str, positions: int) -> dict[str, Any]:
    """One rung's step as a measurement, for a panel; on a CPU the references."""
    moved = roofline.decode_bytes(loaded.model.config, positions)
    if subject is not None:
        times, who = subject.series(rung, positions, 10), rung
    else:
        prompt = text_study.prompt(loaded, positions, positions // 2, 0)
        times = loop_time([partial(gemv_study.step, prompt, Ops())], rounds=10, device=bench.device)
        who = REFERENCES
    return measurement(
        f"{at(loaded.name, positions)}, {who}", who, METRIC, "ms", times, bytes=moved, ceiling=bench.roof
    )
