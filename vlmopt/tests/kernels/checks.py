"""What every kernel has to show, as functions that a kernel's own test calls with its module and op.

On a machine without a GPU kernels run in Triton's interpreter, in fp32 and on the small cases only; `variants` gives
these to every machine and all cases in half precision to machines with a GPU.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from vlmopt.bench.compilations import compiled
from vlmopt.errors import VlmoptError
from vlmopt.kernels import oracle
from vlmopt.kernels.case import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def variants(module: ModuleType) -> pytest.MarkDecorator:
    """Parametrises a test over (case, dtype)."""
    small = [(case, torch.float32) for case in module.CASES if case.cpu]
    full = [(case, dtype) for case in module.CASES for dtype in (torch.bfloat16, torch.float16)]
    assert small, f"{module.__name__} has no case for the interpreter"
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            *(pytest.param(*pair, id=_label(*pair)) for pair in small),
            *(pytest.param(*pair, id=_label(*pair), marks=pytest.mark.gpu) for pair in full),
        ],
    )


def _label(case: Case, dtype: torch.dtype) -> str:
    return f"{case.name} {_NAMES[dtype]}".replace(" ", "-")


def arguments(module: ModuleType, case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments of a case on the machine's device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return module.make(case.params, DEVICE, dtype, generator)


def small(module: ModuleType) -> tuple[Any, ...]:
    """Arguments of the module's first small case in fp32."""
    return arguments(module, next(case for case in module.CASES if case.cpu))


def agrees(module: ModuleType, op: str, case: Case, dtype: torch.dtype) -> None:
    """The kernel is as good as its reference on random arguments of two seeds."""
    for seed in (0, 100):
        errors = oracle.compare_case(module, op, case, DEVICE, dtype, seed)
        assert errors.ok, f"{case.name}, {dtype}, seed {seed}: {errors}"


def rejects(module: ModuleType, op: str, args: Sequence[Any], wrong: Callable[..., Any]) -> None:
    """The oracle sees that `wrong`, called like the op, is wrong, and that the op is right."""
    assert oracle.compare(module, op, args).ok
    assert not oracle.compare(module, op, args, wrong).ok, "the oracle accepts a wrong answer"


def writes_everything(module: ModuleType, op: str, args: Sequence[Any]) -> None:
    """With all fresh memory poisoned (NaN, or the largest integer) the result is the same and holds no NaN."""
    fn = getattr(module, op)
    plain = oracle.outputs(module, fn, args)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.empty(1, device=DEVICE).isnan().all(), "fresh memory is not poisoned"
        poisoned = oracle.outputs(module, fn, args)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
    assert not any(tensor.isnan().any() for tensor in poisoned), "an element was never written"
    same_bits(plain, poisoned)


def leaves_inputs_alone(module: ModuleType, op: str, args: Sequence[Any]) -> None:
    """No argument changes but those that the module's `MUTATES` names; these do, or the check would be empty."""
    before = [oracle.clone(arg) for arg in args]
    own = [oracle.clone(arg) for arg in args]
    getattr(module, op)(*own)
    written = getattr(module, "MUTATES", ())
    for i, (old, new) in enumerate(zip(before, own, strict=True)):
        equal = all(map(torch.equal, oracle.flatten([old]), oracle.flatten([new])))
        assert equal != (i in written), f"argument {i} {'was not written' if equal else 'changed'}"


def takes_strides(module: ModuleType, op: str, args: Sequence[Any], indices: Sequence[int]) -> None:
    """The arguments of these indices as rows that lie apart, with NaN between, give the same bits."""
    apart = [spread(arg) if i in indices else arg for i, arg in enumerate(args)]
    assert module.supports(*apart) is None, module.supports(*apart)
    fn = getattr(module, op)
    same_bits(oracle.outputs(module, fn, args), oracle.outputs(module, fn, apart))


def spread(value: Any) -> Any:
    """The same values in rows that lie apart in a wider tensor full of NaN; sequences item by item."""
    if isinstance(value, list | tuple):
        return [spread(item) for item in value]
    wide = value.new_full((*value.shape[:-1], value.shape[-1] + 24), float("nan"))
    wide[..., : value.shape[-1]] = value
    return wide[..., : value.shape[-1]]


def replays(module: ModuleType, op: str, args: Sequence[Any]) -> None:
    """Eager and replayed from a CUDA graph, the bits are the same (a GPU test)."""
    fn = getattr(module, op)
    eager = oracle.outputs(module, fn, args)
    written = getattr(module, "MUTATES", ())
    own = [oracle.clone(arg) if i in written else arg for i, arg in enumerate(args)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(*own)
    tensors = [*oracle.flatten(result), *oracle.flatten([own[i] for i in written])]
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        same_bits(eager, tensors)


def advances_in_a_graph(
    expect: Callable[..., Tensor], attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, row: Tensor
) -> None:
    """Replays of one graph that moves `row` on give what `expect` gives at each row (a GPU test)."""
    rows = range(190, 260)
    expected = [expect(q, k, v, torch.full_like(row, i)) for i in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, row)
        row.add_(1)
    row.fill_(rows.start)
    for wanted in expected:
        graph.replay()
        same_bits([wanted], [out])


def sees_the_kernel_in_front(
    in_order: Callable[..., Tensor], dependent: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, row: Tensor
) -> None:
    """A dependent launch reads the query and the newest rows that the kernels before it write (a GPU test).

    `in_order` is the same launch without the dependence. The caches [.., positions, ..] end with the newest rows.
    """
    newest = torch.arange(k.shape[1] - q.shape[0], k.shape[1], device=q.device)
    steps = [[torch.randn_like(q), *(torch.randn_like(cache[:, newest]) for cache in (k, v))] for _ in range(50)]

    def run(attend: Callable[..., Tensor]) -> list[Tensor]:
        found = []
        for new_q, new_k, new_v in steps:
            q.copy_(new_q)
            k.index_copy_(1, newest, new_k)
            v.index_copy_(1, newest, new_v)
            found.append(attend(q, k, v, row))
        return found

    expected = run(in_order)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(dependent)
    for _ in range(3):
        graph.replay()
        same_bits(expected, found)


def keeps_poison_in_its_row(
    module: ModuleType,
    op: str,
    args: Sequence[Any],
    poison: Callable[[list[Any], float], None],
    others: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    """NaN or infinity in one row of the input changes nothing outside that row of the output.

    `poison` writes the given value into the (cloned) arguments; `others` picks from the outputs what must not change.
    """
    fn = getattr(module, op)
    clean = oracle.outputs(module, fn, args)
    for value in (float("nan"), float("inf"), float("-inf")):
        own = [oracle.clone(arg) for arg in args]
        poison(own, value)
        dirty = oracle.outputs(module, fn, own)
        same_bits(others(clean), others(dirty))
        assert not all(map(torch.equal, clean, dirty)), "the poison did not reach its own row"


def refuses(module: ModuleType, op: str, args: Sequence[Any], words: str) -> None:
    """`supports` gives a reason that holds `words`, and the public op raises with exactly it."""
    reason = module.supports(*args)
    assert reason is not None and words in reason, reason
    with pytest.raises(VlmoptError) as caught:
        getattr(module, op)(*args)
    assert str(caught.value) == reason


def compiles_nothing_new(module: ModuleType, op: str, case: Case, **ranges: tuple[int, int]) -> None:
    """After two sizes, 50 random ones make Triton compile nothing (a GPU test).

    Args:
        ranges: for parameters of the case, the lowest and highest value to draw.
    """
    drawn = random.Random(0)
    sizes = [{name: drawn.randint(*span) for name, span in ranges.items()} for _ in range(50)]
    sizes = [{name: span[0] for name, span in ranges.items()}, {name: span[1] for name, span in ranges.items()}, *sizes]
    calls = [
        partial(getattr(module, op), *arguments(module, Case("", {**case.params, **size}), torch.bfloat16))
        for size in sizes
    ]
    forget(module)
    assert compiled(calls[:2]), "the warm-up compiled nothing, so nothing was counted"
    assert compiled(calls[2:]) == []


def forget(module: ModuleType) -> None:
    """Make Triton prepare the kernels of `module` anew, whatever an earlier test has already launched."""
    for value in vars(module).values():
        if isinstance(value, triton.JITFunction):
            value.device_caches.clear()


def is_registered(op: Any, args: Sequence[Any]) -> None:
    """The registered op's schema and fake agree with what it does."""
    torch.library.opcheck(op, tuple(args), test_utils=("test_schema", "test_faketensor"))


def same_bits(expected: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Equal shapes and values; NaN equals NaN."""
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
