"""Whether the index values of an op are in range, asked before it runs.

On a GPU an index out of range is an assertion in a kernel, after which the process can use the device no more. So what
runs on drawn ids, which nobody promised to be valid, asks first, and so does a batch that does not run as a replay: one
host read for each indexing op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Wrong = Callable[..., Iterator[Tensor]]
CHECKED: dict[Any, Wrong] = {}  # overload -> bool tensors that are True where the op would fail
ASSERTED = {aten._assert_async.default, aten._assert_async.msg, aten.binary_cross_entropy.default}
MASKS = (torch.bool, torch.uint8)
MOST_ROWS = 2**31  # of one op; no batch that fits a device has as many


def _check_of(*ops: str) -> Callable[[Wrong], Wrong]:
    """`ops`: an overload as "name.overload", or all of a name."""

    def register(function: Wrong) -> Wrong:
        for op in ops:
            name, _, overload = op.partition(".")
            packet = getattr(aten, name)
            CHECKED.update({getattr(packet, o): function for o in ([overload] if overload else packet.overloads())})
        return function

    return register


def insert_checks(graph: Graph) -> None:
    """In front of each op that reads or writes by index, a call that raises IndexError where it would fail: for what
    runs many times, as a mode makes every op of it slower (1.6 ms in place of 1.1 for a dry run on a CPU)."""
    for node in list(graph.nodes):
        if node.target in CHECKED:
            with graph.inserting_before(node):
                check = graph.call_function(refuse_out_of_range, (node.target, *node.args), dict(node.kwargs))
            check.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}


def refuse_out_of_range(op: Any, *args: Any, **kwargs: Any) -> None:
    """Raises IndexError where `op` on these arguments would fail because of their values."""
    for wrong in CHECKED[op](*args, **kwargs):
        if wrong.any():
            raise IndexError(f"{'value' if op in ASSERTED else 'index'} out of range in {op}")


class CheckedIndices(TorchDispatchMode):
    """Asks before each op that is dispatched inside, in-place ones included. Raises IndexError."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        functional = _functional(func)
        if functional in CHECKED:
            refuse_out_of_range(functional, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def faults(device: torch.device) -> bool:
    """Whether a wrong index is an assertion in a kernel there, and not an exception."""
    return device.type == "cuda"


def checked(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """`CheckedIndices` where it is needed."""
    return CheckedIndices() if faults(device) else contextlib.nullcontext()


@cache
def _functional(op: Any) -> Any:
    """The op whose arguments `op` has: without the underscore, where it works in place."""
    if not isinstance(op, OpOverload):
        return op
    name = str(op.overloadpacket.__name__)
    name = {"_index_put_impl_": "index_put", "_unsafe_index": "index"}.get(name, name).removesuffix("_")
    packet = getattr(aten, name, None) if op.namespace == "aten" else None
    return getattr(packet, op._overloadname, op)


def direct_limits(graph: Graph) -> dict[Node, int]:
    """Of each node that is used as an index, as it is or with a constant added (`indptr[ids + 1]`): the least bound on
    its values that the static sizes give."""
    limits: dict[Node, int] = {}
    for node in graph.nodes:
        for index, size in _indexed(node):
            if isinstance(index, Node) and type(size) is int:
                limits[index] = min(size, limits.get(index, size))
    for index, size in list(limits.items()):
        if index.target is aten.add.Tensor and type(index.args[1]) is int and not index.kwargs:
            base: Any = index.args[0]
            limits[base] = min(size - index.args[1], limits.get(base, size))
    return limits


def _indexed(node: Node) -> Iterator[tuple[Any, Any]]:
    """(index, size that it indexes) of an op whose source is its first argument."""
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(source, Tensor):
        return
    if CHECKED.get(node.target) is _along_dimension and source.dim():
        yield node.args[2], source.shape[node.args[1]]  # type: ignore[index]
    elif node.target is aten.embedding.default:
        yield node.args[1], source.shape[0]
    elif node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        if all(i is None or i.meta["val"].dtype not in MASKS for i in indices):
            yield from ((i, source.shape[d]) for d, i in enumerate(indices) if i is not None)


def _outside(index: Tensor, size: int, low: int = 0) -> Tensor:
    return (index < low) | (index >= size)


# -- one function for each way of indexing


@_check_of(
    "index_select", "gather", "index_add", "index_copy", "index_reduce",
    "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
def _along_dimension(source: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> Iterator[Tensor]:
    yield _outside(index, source.shape[dim] if source.dim() else 1)


@_check_of("index_fill")
def _filled(source: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> Iterator[Tensor]:
    size = source.shape[dim] if source.dim() else 1
    yield _outside(index, size, -size)


@_check_of("index.Tensor", "index_put")
def _by_position(source: Tensor, indices: list[Tensor | None], *_: Any, **__: Any) -> Iterator[Tensor]:
    """A mask stands for as many dimensions as it has; integers may count from the end."""
    at = 0
    for index in indices:
        if index is not None and index.dtype not in MASKS:
            yield _outside(index, source.shape[at], -source.shape[at])
        at += index.dim() if index is not None and index.dtype in MASKS else 1


@_check_of("take", "put")
def _flat(source: Tensor, index: Tensor, *_: Any, **__: Any) -> Iterator[Tensor]:
    yield _outside(index, source.numel(), -source.numel())


@_check_of("embedding")
def _rows_of_weight(weight: Tensor, index: Tensor, *_: Any, **__: Any) -> Iterator[Tensor]:
    yield _outside(index, weight.shape[0])


@_check_of("embedding_dense_backward")
def _rows_of_gradient(grad: Tensor, index: Tensor, rows: int, *_: Any, **__: Any) -> Iterator[Tensor]:
    yield _outside(index, rows)


@_check_of("nll_loss_forward")
def _classes(
    scores: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int, *_: Any, **__: Any
) -> Iterator[Tensor]:
    yield _outside(target, scores.shape[-1]) & (target != ignore)


@_check_of("nll_loss_backward")
def _classes_backward(grad: Tensor, *forward: Any, **__: Any) -> Iterator[Tensor]:
    yield from _classes(*forward)


@_check_of("repeat_interleave.Tensor")
def _repeats(repeats: Tensor, output_size: int | None = None, **__: Any) -> Iterator[Tensor]:
    """ATen trusts a given `output_size` on a GPU, and everywhere a sum that may have wrapped around."""
    yield repeats < 0
    yield repeats.sum(dtype=torch.float64) > MOST_ROWS
    if output_size is not None:
        yield repeats.sum() != output_size


@_check_of("masked_scatter")
def _enough_values(source: Tensor, mask: Tensor, values: Tensor) -> Iterator[Tensor]:
    yield torch.broadcast_tensors(source, mask)[1].sum() > values.numel()


@_check_of("_assert_async")
def _asserted(value: Tensor, *_: Any) -> Iterator[Tensor]:
    yield value == 0


@_check_of("binary_cross_entropy.default")
def _probabilities(values: Tensor, target: Tensor, *_: Any, **__: Any) -> Iterator[Tensor]:
    yield ~((values >= 0) & (values <= 1))
    yield ~((target >= 0) & (target <= 1))
