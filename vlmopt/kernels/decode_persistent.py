"""A whole greedy decode step in one launch: `decode_step` and `lm_head_argmax` of one token over the cache.

    h = embed[token];  for every layer:  h += o(attention(rope(norm(qkv(norm(h))))));  h += down(silu(gate) · up)
    token = argmax(head(norm(h)));  row += 1;  history[row] = token

bf16; one row; heads of 128, two query heads a KV head; weights packed as the checkpoint's rows: qkv [(Hq + 2·Hkv)·128,
hidden], gate_up [2·mlp, hidden] with gate's rows first. `token`, `row`, `delta` [1] int64 live on the device and
advance there, so a captured graph can hold any number of steps. Class near: the references' rounding points, other
orders of summation; softmax weights stay in fp32. Bits depend on the number of blocks (that of the GPU's
multiprocessors) and on `row`, not on the capacity.

Moves every weight, the live keys and values once; 2 FLOPs a weight. What it replaces is five launches a layer, each of
which drains the memory pipe and fills it again. Here one block sits on every multiprocessor; two of its warps copy
the block's share of all weights, keys and values into a ring of 195 KB, in the order of their use, however long the
block has to wait for others: five microseconds of copying fit. Eight warps consume it:

1. RMSNorm by every block for itself, qkv;
2. attention: block b has KV head b mod Hkv and slot b div Hkv, which takes every n-th chunk of 64 keys; the sums of all
   slots are combined by these blocks, each for its own dimensions;
3. o, added to h;  4. RMSNorm, gate and up, activation;  5. down, added to h.

There is no barrier: whatever crosses blocks does so as 64-bit words of two values and a tag that only this layer of
this step has, and a reader polls the very words that it needs. That is one trip through a memory system full of weights
where a barrier takes four (fence, count, poll, load). A word is overwritten a layer later, by blocks that have through
the words in between waited for all its readers (`run_layers` has the argument), so each kind needs one buffer.

A unit of 16 weight rows is multiplied by matrix instructions whose columns all hold the same activations; each of the
eight warps takes 64 of every 512 columns, and their sums meet in shared memory in a fixed order. The last block to
finish the head picks the token. Tags count up from a base that the step itself stores, so replays need no memset.

All blocks must run at once: the launch is cooperative, or, as a dependent launch (`dependent`), relies on a GPU that
runs nothing beside it. A wait of about two seconds stops the kernel with a fault, which `fault()` then names.

The idea of one launch over all layers is known as a megakernel (Hazy Research, 2025).
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmopt.kernels import decode_layer, native
from vlmopt.kernels.case import Case, require
from vlmopt.kernels.decode_layer import GROUP, WIDTH, Layer, Trace, random_layer, trace_ref
from vlmopt.kernels.lm_head import lm_head_argmax_ref

STEM = "decode_persistent"
ROWS = 16
MAX_HIDDEN = 4096
MAX_SLOTS = 32
MAX_SHARED = 227 * 1024
STATE_WORDS = 64
MARKS = (
    *("stream", "norm", "qkv", "q/k norm and rotation", "own keys", "all slots", "attended", "o"),
    *("stream", "norm", "gate/up", "activated", "down"),
)
"""What ends at each of a layer's marks; after the layers come "stream", "norm" and "head"."""
SITES = (
    *("", "a free stage of the ring", "a stage's data", "the residual stream", "qkv", "the other slots' sums"),
    *("attention's rows", "the activation's rows"),
)


class Model(NamedTuple):
    """The language model's tensors; `cos` and `sin` [positions, 128] by row + delta."""

    layers: Sequence[Layer]
    embed: Tensor
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    head_eps: float


class Buffers(NamedTuple):
    """`cache` [layers, 2, Hkv, capacity, 128]; `token`, `row`, `delta` [1] and `history` [> capacity] int64."""

    cache: Tensor
    token: Tensor
    row: Tensor
    delta: Tensor
    history: Tensor


def layer_ref(h: Tensor, index: int, model: Model, buffers: Buffers) -> Trace:
    """One layer over h [1, hidden] in the references' own operations; writes the cache. Waits for the device."""
    place = buffers.row + buffers.delta
    angles = model.cos.index_select(0, place), model.sin.index_select(0, place)
    return trace_ref(h, model.layers[index], model.eps, model.head_eps, *angles, *buffers.cache[index], buffers.row)


def decode_persistent_ref(model: Model, buffers: Buffers) -> Tensor:
    """The step; returns the stream before the final norm [hidden]. Waits for the device."""
    h = F.embedding(buffers.token, model.embed)
    for index in range(len(model.layers)):
        h = layer_ref(h, index, model, buffers).h
    buffers.token.copy_(lm_head_argmax_ref(h, model.norm, model.eps, model.head))
    buffers.row.add_(1)
    buffers.history.index_copy_(0, buffers.row, buffers.token)
    return h[0]


_POINTERS_BEFORE = ("layers", "embed", "norm", "head", "cos", "sin", "cache")
_STRIDES = ("cache_stride_layer", "cache_stride_kv", "cache_stride_head")
_POINTERS = (
    *("token", "row", "history", "delta", "after_o", "after_down", "qkv", "attended", "activated"),
    *("sums", "stats", "state", "keys", "fault", "marks"),
)
_SIZES = (
    *("n_layers", "hidden", "mlp", "heads", "kv_heads", "vocabulary", "capacity", "rope_rows"),
    *("with_head", "n_marks"),
)
_REALS = ("eps", "head_eps", "scale")


class Arguments(ctypes.Structure):
    """The kernel's parameter, field by field as in `decode_persistent_common.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS_BEFORE),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _SIZES),
        *((name, ctypes.c_float) for name in _REALS),
    )


def shared_bytes(n_layers: int, hidden: int, mlp: int, heads: int) -> int:
    """Shared memory of a block."""
    ring = 12 * ROWS * (512 * 2 + 16)
    scratch = 4 * (8 * GROUP * WIDTH + 2 * 8 * GROUP)
    return ring + 256 + 2 * max(hidden, mlp, heads * WIDTH) + 2 * hidden + scratch + 12 * WIDTH + 64 + 64 * n_layers


def supports(model: Model, buffers: Buffers) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    return _unfit_shapes(model, buffers) or _unfit_memory(model, buffers) or native.refusal(model.embed.device)


def _unfit_shapes(model: Model, buffers: Buffers) -> str | None:
    cache = buffers.cache
    if not model.layers or cache.dim() != 5 or cache.shape[:2] != (len(model.layers), 2) or cache.shape[4] != WIDTH:
        return f"cache is {list(cache.shape)}; give [{len(model.layers)} layers, 2, Hkv, capacity, {WIDTH}]"
    vocabulary, hidden = model.embed.shape
    kv_heads, capacity = cache.shape[2:4]
    heads, mlp = GROUP * kv_heads, model.layers[0].down.shape[-1]
    if hidden % 64 or mlp % 64 or not 0 < hidden <= MAX_HIDDEN or not mlp:
        return f"hidden {hidden} and MLP {mlp}; the kernel takes multiples of 64, hidden up to {MAX_HIDDEN}"
    expected = Layer(
        *((hidden,), ((heads + 2 * kv_heads) * WIDTH, hidden), (WIDTH,), (WIDTH,), (hidden, heads * WIDTH)),
        *((hidden,), (2 * mlp, hidden), (hidden, mlp)),
    )
    for index, layer in enumerate(model.layers):
        for name, tensor, shape in zip(Layer._fields, layer, expected, strict=True):
            if tuple(tensor.shape) != shape:
                return f"{name} of layer {index} is {list(tensor.shape)}; {heads} heads of {WIDTH} need {list(shape)}"
    if tuple(model.head.shape) != (vocabulary, hidden) or tuple(model.norm.shape) != (hidden,):
        return f"head is {list(model.head.shape)} and norm {list(model.norm.shape)}; embed is {[vocabulary, hidden]}"
    if model.cos.dim() != 2 or model.cos.shape != model.sin.shape or model.cos.shape[1] != WIDTH or not len(model.cos):
        return f"cos and sin of the shapes {list(model.cos.shape)}, {list(model.sin.shape)}; give [positions, {WIDTH}]"
    for name in ("token", "row", "delta", "history"):
        tensor = getattr(buffers, name)
        wanted = capacity + 1 if name == "history" else 1
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] < wanted:
            return f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; give int64 [{wanted}]"
    if shared_bytes(len(model.layers), hidden, mlp, heads) > MAX_SHARED:
        return f"an MLP of {mlp} and {len(model.layers)} layers do not fit a multiprocessor's shared memory"
    return None


def _unfit_memory(model: Model, buffers: Buffers) -> str | None:
    floats = {name: getattr(model, name) for name in ("embed", "norm", "head", "cos", "sin")}
    for index, layer in enumerate(model.layers):
        floats |= {f"{name} of layer {index}": tensor for name, tensor in layer._asdict().items()}
    for name, tensor in (floats | {"cache": buffers.cache}).items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}; the kernel takes bfloat16"
        if tensor.data_ptr() % 16:
            return f"{name} does not begin at a multiple of 16 bytes"
    for name, tensor in (floats | {key: getattr(buffers, key) for key in ("token", "row", "delta", "history")}).items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous; call .contiguous() first"
    strides = buffers.cache.stride()
    if strides[3:] != (WIDTH, 1) or any(stride % 8 for stride in strides[:3]):
        return f"the cache has the strides {strides}; a head's rows must be neighbours"
    for name, tensor in (floats | buffers._asdict()).items():
        if tensor.device != model.embed.device:
            return f"{name} is on {tensor.device} but embed is on {model.embed.device}; move them to one device"
    return None


class DecodePersistent:
    """The step over fixed tensors: the kernel's table and scratch memory are made once.

    Raises:
        VlmoptError: `supports` gives a reason.
    """

    def __init__(self, model: Model, buffers: Buffers):
        require(supports(model, buffers))
        self.model, self.buffers = model, buffers
        device = model.embed.device
        hidden, mlp = model.layers[0].down.shape
        kv_heads, capacity = buffers.cache.shape[2:4]
        heads = GROUP * kv_heads
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        slots = min(self.blocks // kv_heads, MAX_SLOTS)
        require(None if slots else f"{kv_heads} KV heads need as many blocks; the GPU has {self.blocks}")

        def words(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._table = torch.tensor([[tensor.data_ptr() for tensor in layer] for layer in model.layers], device=device)
        widths = {"after_o": hidden, "after_down": hidden, "qkv": (heads + 2 * kv_heads) * WIDTH}
        widths |= {"attended": heads * WIDTH, "activated": mlp}
        self._rows = {name: words(width // 2) for name, width in widths.items()}
        self._sums, self._stats = words(kv_heads, slots, GROUP * WIDTH), words(kv_heads, slots, GROUP, 2)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._keys = words(self.blocks)
        self._fault = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        tensors = {
            **{name: getattr(model, name) for name in ("embed", "norm", "head", "cos", "sin")},
            **buffers._asdict(),
            **{"layers": self._table, **self._rows, "sums": self._sums, "stats": self._stats},
            **{"state": self._state, "keys": self._keys, "fault": self._fault},
        }
        self._arguments = Arguments(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            **dict(zip(_STRIDES, buffers.cache.stride()[:3], strict=True)),
            **{"n_layers": len(model.layers), "hidden": hidden, "mlp": mlp, "heads": heads, "kv_heads": kv_heads},
            **{"vocabulary": len(model.embed), "capacity": capacity, "rope_rows": len(model.cos), "with_head": 1},
            **{"eps": model.eps, "head_eps": model.head_eps, "scale": 1.4426950408889634 * WIDTH**-0.5},
        )
        native.function(STEM, f"{STEM}_prepare")()
        self._launch = native.function(
            *(STEM, f"{STEM}_launch", ctypes.POINTER(Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        )

    def step(self, dependent: bool = False) -> None:
        """One step on the current stream; with `dependent` its weights are on their way before the last launch ends."""
        self._run(self._arguments, dependent)

    def run_layers(self, n_layers: int) -> None:
        """The first layers alone: leaves what the last made in `latest()` and the token and the row as they are."""
        arguments = Arguments.from_buffer_copy(self._arguments)
        arguments.n_layers, arguments.with_head = n_layers, 0
        self._run(arguments, False)

    def _run(self, arguments: Arguments, dependent: bool) -> None:
        self._launch(ctypes.byref(arguments), self.blocks, dependent, native.stream(self.model.embed.device))

    def timeline(self) -> Tensor:
        """Cycles [blocks, 13 · layers + 3] that every block spent on the way to each of its marks, in one step."""
        marks = self._keys.new_zeros(self.blocks, len(MARKS) * len(self.model.layers) + 3)
        arguments = Arguments.from_buffer_copy(self._arguments)
        arguments.marks, arguments.n_marks = marks.data_ptr(), marks.shape[1]
        self._run(arguments, False)
        return marks.diff(dim=1, prepend=marks[:, :1])

    def latest(self) -> Trace:
        """What the last layer of the latest step made, without the rows' first dimension."""
        names = ("after_down", "qkv", "attended", "activated")
        return Trace(*(self._rows[name].view(torch.int32)[::2].contiguous().view(torch.bfloat16) for name in names))

    @property
    def h(self) -> Tensor:
        """The stream before the final norm of the latest step [hidden]."""
        return self.latest().h

    def fault(self) -> str | None:
        """What a step that stopped itself was waiting for; readable although the device is lost."""
        code = int(self._fault[0])
        if not code:
            return None
        site, block, warp = code >> 56 & 0x7F, code >> 40 & 0xFFFF, code >> 32 & 0xFF
        return f"block {block}, warp {warp} waited for {SITES[site]} (detail {code & 0xFFFFFFFF})"


def launch(
    layers: Sequence[Sequence[Tensor]],
    embed: Tensor,
    norm: Tensor,
    head: Tensor,
    rope: tuple[Tensor, Tensor],
    eps: float,
    head_eps: float,
    cache: Tensor,
    token: Tensor,
    row: Tensor,
    delta: Tensor,
    history: Tensor,
) -> Callable[[], None]:
    """One step over these tensors, as a function of nothing.

    Args:
        layers: a `Layer`'s tensors each.
        rope: cos and sin [positions, 128].

    Raises:
        VlmoptError: `supports` gives a reason.
    """
    model = Model([Layer(*tensors) for tensors in layers], embed, norm, head, *rope, eps, head_eps)
    return DecodePersistent(model, Buffers(cache, token, row, delta, history)).step


def make(params: dict, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Model, Buffers]:
    """A random model and its buffers, at row `length` - 1; the cache is full of NaN from that row on."""
    n_layers, hidden, mlp, kv_heads, vocabulary, length, capacity = (
        params[name] for name in ("layers", "hidden", "mlp", "kv_heads", "vocabulary", "length", "capacity")
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layers = [random_layer(hidden, mlp, kv_heads, device, dtype, generator) for _ in range(n_layers)]
    embed, head = normal(vocabulary, hidden), 0.02 * normal(vocabulary, hidden)
    norm = 1 + 0.3 * normal(hidden)
    angles = torch.arange(capacity + 8, device=device)[:, None] * 5e6 ** -(torch.arange(WIDTH, device=device) % 64 / 64)
    cache = torch.full((n_layers, 2, kv_heads, capacity, WIDTH), float("nan"), dtype=dtype, device=device)
    for layer in cache:
        layer[:, :, : length - 1] = normal(2, kv_heads, length - 1, WIDTH)
    token, row, delta = (torch.tensor([n], device=device) for n in (vocabulary // 3, length - 1, 5))
    history = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
    model = Model(layers, embed, norm, head, angles.cos().to(dtype), angles.sin().to(dtype), 1e-6, 1e-6)
    return model, Buffers(cache, token, row, delta, history)


def _case(name: str, layers: int, length: int, capacity: int, small: bool = False) -> Case:
    sizes = (256, 768, 2, 331) if small else (2048, 6144, 8, 151936)
    shape = dict(zip(("hidden", "mlp", "kv_heads", "vocabulary"), sizes, strict=True))
    return Case(f"{name} length {length:,}", {"layers": layers, **shape, "length": length, "capacity": capacity}, small)


CASES = (
    *(_case("small", 4, length, 320, small=True) for length in (1, 2, 63, 64, 65, 200, 320)),
    *(_case("4 layers", 4, length, 4352) for length in (1, 64, 65, 800, 4095)),
    _case("2B", 28, 800, 1024),
)


def cost(
    layers: int, hidden: int, mlp: int, kv_heads: int, vocabulary: int, length: int, itemsize: int = 2, **_: int
) -> tuple[int, int]:
    """Bytes moved (weights and live keys and values; the rest is next to nothing) and FLOPs."""
    moved, flops = decode_layer.cost(1, hidden, mlp, kv_heads, length, itemsize)
    head = vocabulary * hidden
    return layers * moved + head * itemsize, layers * flops + 2 * head
