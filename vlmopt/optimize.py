"""plan → apply → status, and revert: the public API on one model instance."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from tqdm.auto import tqdm

from vlmopt import weights as model_weights
from vlmopt.capabilities import probe
from vlmopt.config import OptimizeConfig, as_config
from vlmopt.errors import PartFailed, VlmoptError
from vlmopt.kernels import kv_fp8
from vlmopt.ops import ENTRIES, Ops, kernels_of, table
from vlmopt.quant import costs
from vlmopt.quant.kv_scales import with_kv_scales
from vlmopt.quant.pack import Copies, bytes_of, pack, products_of, require_scheme, with_copies
from vlmopt.quant.products import over_copies
from vlmopt.quant.schemes import SCHEMES
from vlmopt.runtime import eagle_head
from vlmopt.runtime.cache import KVCache
from vlmopt.runtime.generate import ENGINES, Engine, has_foreign_generate, install, remove
from vlmopt.runtime.guard import Guard

Class = Literal["exact", "near", "lossy"]
ORDER: tuple[Class, ...] = ("exact", "near", "lossy")
PLANS: WeakKeyDictionary[nn.Module, "Plan"] = WeakKeyDictionary()
"""What came true of each optimised model's plan."""
OFF = {"kernels": "none", "speculate": "none", "weights": "none", "kv_cache_dtype": "auto"}
"""What switches a part off whose option is more than a flag."""
DRAFTERS = {"lookup": "prompt lookup", "eagle": "an EAGLE-3 head, for which stages serve the prompt"}
KV_FP8 = (
    "keys and values in e4m3, a byte each, under scales from the weights; the kernel in Triton attends to them "
    "(decode_layer reads no such cache) and stages fill it (C++ does not) after a prompt has attended to them unrounded"
)
WARM_UP_POSITIONS = 2048
"""Positions for which cache, graphs and a prompt's memory are made when the model is optimised: a photo, a question,
1,024 tokens."""


@dataclass(frozen=True)
class Part:
    """One part of a config: whether it runs, why not, and its class."""

    name: str
    state: Literal["on", "off", "skipped"]
    reason: str
    cls: Class


@dataclass(frozen=True)
class Plan:
    """What would run. `cls` is the class of the weakest part that is on; `memory` is in bytes."""

    config: OptimizeConfig
    cls: Class
    parts: list[Part]
    memory: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{self.config.name}: {self.cls}"]
        lines += [f"  {part.name:<14} {part.state:<8} {part.cls:<6} {part.reason}" for part in self.parts]
        lines += [f"  {name:<14} {size / 2**20:,.1f} MiB" for name, size in self.memory.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Status:
    """What is active on a model, and who served its `generate` calls since it was optimised.

    `calls` counts "stages" (served by our stages), "kernels" (of these, with at least one kernel of ours) and "stock"
    (handed to stock, with `stock_reasons`). `cpp_launches` are those that the C++ runtime has issued, warm-up included;
    on a CPU they are its steps. `speculation` counts "calls" decoded with drafts, their "steps", of which "drafts" had
    something to draft, and of the drafted tokens "tried", up to the first that fails, those that "held".
    """

    active: bool
    config: OptimizeConfig
    cls: Class
    parts: list[Part] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=lambda: {"stages": 0, "kernels": 0, "stock": 0})
    stock_reasons: dict[str, int] = field(default_factory=dict)
    cpp_launches: int = 0
    speculation: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """The status as plain JSON values."""
        return {
            "active": self.active,
            "config": self.config.model_dump(mode="json"),
            "class": self.cls,
            "parts": [asdict(part) for part in self.parts],
            "calls": dict(self.calls),
            "stock_reasons": dict(self.stock_reasons),
            "cpp_launches": self.cpp_launches,
            "speculation": dict(self.speculation),
        }


def plan(model: nn.Module, config: str | OptimizeConfig, copies: Copies | None = None) -> Plan:
    """Say what `optimize` would do, without doing it.

    Args:
        model: a transformers `Qwen3VLForConditionalGeneration`.
        config: a preset's name or an `OptimizeConfig`.
        copies: as `optimize` takes them; where what their own scheme costs is recorded, that is told.

    Raises:
        VlmoptError: an unknown preset, entry or kernel, or a model that cannot be served.
    """
    config = as_config(config)
    reason = model_weights.refusal(model)
    if reason is None and has_foreign_generate(model):
        reason = "its generate was replaced by something else; undo that first"
    if reason is not None:
        raise VlmoptError(f"this model cannot be optimised: {reason}")
    parts = _parts(model, config, copies)
    memory = {"weights": sum(p.numel() * p.element_size() for p in model.parameters())}
    if config.text:
        # reads shapes only, so the parameters are left as they are
        text = model_weights.collect(model, packed=False).text
        memory["kv_cache"] = KVCache.bytes(text, WARM_UP_POSITIONS, _runs(parts, "kv_cache_dtype"))
        if config.has_copies:
            memory["copies"] = bytes_of(text, SCHEMES.get(config.weights), config.head8)
        if not config.keep_originals:
            memory["freed"] = sum(own.weight.nbytes for linears in products_of(text).values() for own in linears)
        if config.speculate == "eagle" and (head := config.draft_head / eagle_head.WEIGHTS).exists():
            memory["draft_head"] = head.stat().st_size
    return Plan(config, _weakest(parts), parts, memory)


def _parts(model: nn.Module, config: OptimizeConfig, copies: Copies | None) -> list[Part]:
    cuda = model.device.type == "cuda"
    needs_text = "" if config.text else "needs the text part"
    here = probe().gpu_name or "no GPU here"
    off_gpu = "" if cuda else f"needs a CUDA device and the model is on {model.device} ({here})"
    asked = _scheme(config, copies), not config.keep_originals
    gate = costs.obstacle(*asked) if config.weights != "none" else ""
    kv_gate = (kv_fp8.unsupported(model.device) or costs.kv_obstacle(*asked) or "") if config.has_fp8_cache else ""
    fp8 = config.has_fp8_cache and not kv_gate
    kernels = kernels_of(config if fp8 else config.model_copy(update=_without(["kv_cache_dtype"])))
    way_back = "" if config.keep_originals else "; what they stand for is freed, so not revertible"
    wants_kernels = config.kernels != "none"
    covered = config.vision and config.connector and config.packed
    needs_parts = needs_text or ("" if covered else "needs the vision, connector and packed parts")
    needs_kernels = off_gpu if wants_kernels else "needs the kernels part on a GPU" if cuda else ""
    return [
        _part("text", config.text, "", "exact", "prefill and decode over one static KV cache"),
        _part("vision", config.vision, needs_text, "exact", "vision tower as one function"),
        _part("connector", config.connector, needs_text, "exact", "merge and mRoPE positions without stock's loops"),
        _part("packed", config.packed, needs_text, "near", "q/k/v and gate/up as one product each"),
        _part("batches", config.batches, needs_text, "near", "2 to 8 prompts in a call, each over its own cache rows"),
        _part(
            *("weights", config.weights != "none", needs_text or gate, "lossy"),
            costs.told(*asked) + way_back if config.weights != "none" and not gate else "",
        ),
        _part(
            *("kv_cache_dtype", config.has_fp8_cache, needs_text or kv_gate, "lossy"),
            f"{KV_FP8}; {costs.kv_told(asked[0])}" if fp8 else "",
        ),
        _part("head8", config.head8, needs_text, "exact", "the greedy choice from an int8 head, looked at again"),
        _part("decode_graph", config.decode_graph, needs_text or off_gpu, "near", "a decode step is one CUDA graph"),
        _part(
            *("speculate", config.speculate != "none", needs_text, "near"),
            f"a step verifies drafts of {DRAFTERS.get(config.speculate)}; calls that sample or shape scores take plain "
            "steps",
        ),
        _part(
            "kernels",
            wants_kernels,
            needs_text or off_gpu,
            "near" if kernels else "exact",
            f"{len(kernels)} of {len(ENTRIES)} ops entries are served by a kernel",
        ),
        _part(
            *("cpp_runtime", config.cpp_runtime, needs_parts or needs_kernels),
            *("near", f"the layer loops of {'vision' if fp8 else 'vision and prefill'} are driven from C++"),
        ),
        _part(
            *("prompt_graphs", config.prompt_graphs, needs_parts or needs_kernels),
            *("near", f"vision and prefill padded to buckets, {'one CUDA graph each' if cuda else 'without graphs'}"),
        ),
        _part("preprocessing", config.preprocessing, off_gpu, "exact", "if the processor is processor.on_device's"),
    ]


def _scheme(config: OptimizeConfig, copies: Copies | None) -> str:
    """By which name the cost of a config's copies is looked up."""
    names = set() if copies is None else {copy.scheme.name for copy in copies.body.values()}
    own = names.pop() if len(names) == 1 else config.weights
    return own if costs.cost_of(own) else config.weights


def _part(name: str, wanted: bool, obstacle: str, cls: Class, what: str) -> Part:
    if not wanted:
        return Part(name, "off", "not asked for", cls)
    return Part(name, "skipped" if obstacle else "on", obstacle or what, cls)


def optimize(model: nn.Module, config: str | OptimizeConfig = "fast", copies: Copies | None = None) -> Status:
    """Optimise this one instance; calling it again replaces the earlier config.

    Args:
        model: a transformers `Qwen3VLForConditionalGeneration`; nothing of it is overwritten but the `generate` of this
            instance, and with `packed` some parameters become views of joint storage (same values). With
            `keep_originals=False` the text layers' products are freed at the end, after which neither stock nor
            another config can run: `revert` and calls that only stock serves raise.
        config: a preset's name or an `OptimizeConfig`.
        copies: quantised weights that were made before (`vlmopt.quant`), of the config's scheme; None makes them anew.

    Returns:
        the status, as `status(model)` gives it.

    Raises:
        VlmoptError: the model cannot be served, or, under `strict`, a part of the config cannot run here. The model is
            then as it was.
    """
    config = as_config(config)
    if copies is not None:
        require_scheme(copies, config.weights, config.head8)
    planned = plan(model, config, copies)
    skipped = [part for part in planned.parts if part.state == "skipped"]
    if config.strict and skipped:
        raise VlmoptError(
            f"preset {config.name!r} cannot run: {skipped[0].name} {skipped[0].reason}; pass strict=False to run "
            "without it, or choose another preset"
        )
    revert(model)
    running = config.model_copy(update=_without([part.name for part in skipped]))
    if running.text:
        PLANS[model] = _install(model, running, planned, copies)
    return status(model)


def _without(names: list[str]) -> dict[str, object]:
    kept = {"keep_originals": True} if "weights" in names else {}
    return {name: OFF.get(name, False) for name in names} | kept


def _install(model: nn.Module, config: OptimizeConfig, planned: Plan, copies: Copies | None) -> Plan:
    """Put the engine in place and return the plan that came true: unless strict, it may have lost parts."""
    try:
        engine = _engine(model, config, copies)
    except BaseException as error:  # whoever interrupts finds the model as it was
        if config.packed:
            model_weights.unpack(model)
        if config.strict or not isinstance(error, PartFailed):
            raise
        planned = _skip(planned, error.part, str(error))
        return _install(model, config.model_copy(update=_without([error.part])), planned, copies)
    install(model, engine)
    if not config.keep_originals:
        model_weights.free(model)
        engine.guard = Guard(model, copied=True)
    return _told(planned, engine)


def _told(planned: Plan, engine: Engine) -> Plan:
    """The plan with the entries that the engine had to leave to the kernels of their parts."""
    if not engine.left_out:
        return planned
    entries = f"{len(engine.kernels)} of {len(ENTRIES)} ops entries are served by a kernel"
    why = "; ".join(f"{name} is not: {reason}" for name, reason in engine.left_out.items())
    parts = [replace(part, reason=f"{entries}; {why}") if part.name == "kernels" else part for part in planned.parts]
    return replace(planned, parts=parts)


def _engine(model: nn.Module, config: OptimizeConfig, copies: Copies | None) -> Engine:
    try:
        collected = model_weights.collect(model, config.packed)
    except torch.OutOfMemoryError as error:
        raise PartFailed("packed", "there is no memory to join a layer's weights") from error
    if config.has_fp8_cache:
        collected = replace(collected, text=with_kv_scales(collected.text))
    if config.has_copies:
        collected = _with_copies(collected, config, copies)
    engine = Engine(model, config, collected, _over(table(config), config), kernels_of(config))
    if engine.kernels:
        engine.try_kernels(model, _over(table(config, checked=True), config, checked=True))
    if config.cpp_runtime:
        engine.start_cpp_runtime(model)
    if config.prompt_graphs:
        engine.start_prompt_graphs(lambda sizes: tqdm(sizes, desc="capturing vision and prefill", leave=False))
    if config.decode_graph:
        engine.warm_up(model, WARM_UP_POSITIONS, lambda items: tqdm(items, desc="capturing decode graphs", leave=False))
    if config.speculate != "none":
        engine.start_speculation(WARM_UP_POSITIONS)
    return engine


def _with_copies(
    collected: model_weights.Weights, config: OptimizeConfig, copies: Copies | None
) -> model_weights.Weights:
    """The weights with copies in their place where a decode step reads them, the originals, if kept, beside them."""
    try:
        if copies is None:
            progress = partial(tqdm, desc="quantising", leave=False)
            copies = pack(collected.text, SCHEMES.get(config.weights), config.head8, progress=progress)
        elif config.weights == "none":  # the part could not run here
            copies = replace(copies, body={})
    except torch.OutOfMemoryError as error:
        part = "weights" if config.weights != "none" else "head8"
        raise PartFailed(part, "there is no memory for copies of the weights") from error
    originals = collected.text if config.keep_originals else None
    return replace(collected, text=with_copies(collected.text, copies), originals=originals)


def _over(ops: Ops, config: OptimizeConfig, checked: bool = False) -> Ops:
    return over_copies(ops, kernels_of(config), checked) if config.has_copies else ops


def _skip(planned: Plan, name: str, reason: str) -> Plan:
    """The plan without one part, for the reason that stopped it."""
    parts = [replace(part, state="skipped", reason=reason) if part.name == name else part for part in planned.parts]
    return replace(planned, parts=parts, cls=_weakest(parts))


def _runs(parts: list[Part], name: str) -> bool:
    return any(part.name == name and part.state == "on" for part in parts)


def _weakest(parts: list[Part]) -> Class:
    return max((part.cls for part in parts if part.state == "on"), key=ORDER.index, default="exact")


def status(model: nn.Module) -> Status:
    """What is active on `model` and who served its calls; inactive for a model that was never optimised."""
    engine = ENGINES.get(model)
    if engine is None:
        return Status(False, OptimizeConfig.preset("stock"), "exact")
    calls = {name: engine.calls[name] for name in ("stages", "kernels", "stock")}
    planned = PLANS[model]
    for name in {"decode_graph", "speculate"} & engine.left_out.keys():
        planned = _skip(planned, name, engine.left_out[name])
    launches = 0 if engine.cpp is None else engine.cpp.launches
    drafts = {} if engine.speculation is None else dict(engine.speculation.counts)
    return Status(True, planned.config, planned.cls, planned.parts, calls, dict(engine.stock_reasons), launches, drafts)


def revert(model: nn.Module) -> None:
    """Give back the stock model: its own `generate`, its own parameter storage, every value bit for bit.

    Raises:
        VlmoptError: `keep_originals=False` has freed its weights.
    """
    engine = ENGINES.get(model)
    if engine is None:
        return
    model_weights.require_originals(model, "this model cannot be reverted")
    remove(model)
    del PLANS[model]
    if engine.config.packed:
        model_weights.unpack(model)


@contextmanager
def optimized(model: nn.Module, config: str | OptimizeConfig = "fast") -> Iterator[Status]:
    """`optimize` for the length of a `with` block, then `revert`.

    Raises:
        VlmoptError: the config frees weights, after which there is no `revert`.
    """
    if not as_config(config).keep_originals:
        raise VlmoptError("a with block gives the model back, which keep_originals=False makes impossible; optimize it")
    try:
        yield optimize(model, config)
    finally:
        revert(model)


__all__ = ["Part", "Plan", "Status", "optimize", "optimized", "plan", "revert", "status"]
