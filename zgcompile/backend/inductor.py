"""Code for everything dense and pointwise of a lowered step comes from Inductor; own ops stay opaque in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zgcompile.kernels.pack_bits import BITS
from zgcompile.keyed_numbers import element_bits

# Random draws are ours and the capture is ours. The FX graph's order is kept: the status record is early in it, and a
# mask is packed where the unpacked one can go. Everything else is Inductor's default.
OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "fallback_random": True,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}
CACHE_TAG = "zgcompile lowerings 2"  # a new number whenever the lowerings below make other code


def compile_with_inductor(fx_graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The lowered FX graph as Inductor code for inputs of these shapes, strides, dtypes and devices; their values are
    not read.

    Inductor keeps what it made in its on-disk cache, which it does only for fake inputs of a mode with a shape
    environment, and for the stock decomposition table.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    _register_lowerings()
    known = {name: value for name, value in OPTIONS.items() if _has_option(config, name)}
    tag = f"{torch.compiler.config.cache_key_tag} {CACHE_TAG}"
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        config.patch(known),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        compiled = compile_fx(fx_graph, fakes)
    return compiled  # type: ignore[return-value]


@cache
def _register_lowerings() -> None:
    """How Inductor writes our ops that have no kernel of their own."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import ops
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    def keyed_bits(key: Any, ordinal: int, size: Sequence[Any]) -> Any:
        """One pointwise loop: as ATen calls, the bits would be stored as 8 bytes an element between forward and
        backward, where a dropout's mask, 1 byte, is enough."""
        load = key.make_loader()

        def inner(index: Sequence[Any]) -> Any:
            # The xor with 0 makes an int64 value of the loop variable, whose own arithmetic on a GPU is 32 bits.
            indices = [_Words(ops.index_expr(i, torch.int64)) ^ 0 for i in index]
            return element_bits(_Words(load([])), ordinal, indices).value

        return Pointwise.create(device=key.get_device(), dtype=torch.int64, inner_fn=inner, ranges=list(size))

    def unpack_bits(bits: Any, size: Sequence[Any]) -> Any:
        load, strides = bits.make_loader(), [math.prod(size[d + 1 :]) for d in range(len(size))]

        def inner(index: Sequence[Any]) -> Any:
            place = sum((i * stride for i, stride in zip(index, strides, strict=True)), start=sympy.S.Zero)
            byte = _Words(ops.to_dtype(load([FloorDiv(place, BITS)]), torch.int64))
            shift = _Words(ops.index_expr(ModularIndexing(place, 1, BITS), torch.int64)) ^ 0
            return ops.ne(((byte >> shift) & 1).value, ops.constant(0, torch.int64))

        return Pointwise.create(device=bits.get_device(), dtype=torch.bool, inner_fn=inner, ranges=list(size))

    def stack_scalars(scalars: Sequence[Any]) -> Any:
        """One loop over the pieces, which are computed in it; as a concatenation, each would be a kernel."""
        loads = [scalar.make_loader() for scalar in scalars]

        def inner(index: Sequence[Any]) -> Any:
            position = ops.index_expr(index[0], torch.int64)
            value = loads[-1]([])
            for i, load in enumerate(loads[:-1]):
                value = ops.where(ops.eq(position, ops.constant(i, torch.int64)), load([]), value)
            return value

        device = scalars[0].get_device()
        return Pointwise.create(device=device, dtype=torch.int64, inner_fn=inner, ranges=[len(loads)])

    def accumulate_mm(total: Any, left: Any, right: Any) -> Any:
        """In place: the op promises that nothing else reads `total`."""
        total.realize()
        fallback_handler(own.accumulate_mm_.default, add_to_fallback_set=False)(total, left, right)
        return total

    own = torch.ops.zgcompile
    for op, lowering in (
        (own.keyed_bits, keyed_bits),
        (own.unpack_bits, unpack_bits),
        (own.stack_scalars, stack_scalars),
        (own.accumulate_mm, accumulate_mm),
    ):
        register_lowering(op.default, type_promotion_kind=None)(lowering)


class _Words:
    """An int64 value inside an Inductor loop, under the operators that `element_bits` uses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, name: str, other: _Words | int) -> _Words:
        from torch._inductor.virtualized import ops

        word = other.value if isinstance(other, _Words) else ops.constant(other, torch.int64)
        return _Words(getattr(ops, name)(self.value, word))

    def __add__(self, other: _Words | int) -> _Words:
        return self._with("add", other)

    def __mul__(self, other: _Words | int) -> _Words:
        return self._with("mul", other)

    def __xor__(self, other: _Words | int) -> _Words:
        return self._with("bitwise_xor", other)

    def __and__(self, other: _Words | int) -> _Words:
        return self._with("bitwise_and", other)

    def __rshift__(self, other: _Words | int) -> _Words:
        return self._with("bitwise_right_shift", other)


def _has_option(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
