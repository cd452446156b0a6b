"""Stand-ins for torch functions, for tracing only: of those that decide something on a size although their result
needs no such decision, and of those that a trace takes otherwise than eager without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from zgcompile.ir.demands import demand


def symbolic_chunk(source: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """`torch.chunk` of a dynamic dimension: `chunks` pieces of ceil(n / chunks) rows, the last one shorter.

    ATen returns fewer pieces where there are fewer rows than pieces; such a batch fails the precondition that the
    comparison here records.
    """
    size = source.shape[dim]
    if not isinstance(size, torch.SymInt) or chunks < 2:
        return torch.chunk(source, chunks, dim)
    piece = size // chunks if _divisible(size, chunks) else (size + chunks - 1) // chunks
    if bool(piece * (chunks - 1) >= size):  # decided by the trace, checked for each batch
        return torch.chunk(source, chunks, dim)
    pieces = [source.narrow(dim, i * piece, piece) for i in range(chunks - 1)]
    rest = piece if _divisible(size, chunks) else size - piece * (chunks - 1)
    return (*pieces, source.narrow(dim, (chunks - 1) * piece, rest))


def _divisible(size: torch.SymInt, by: int) -> bool:
    """Every value of the expression is a multiple: 2*u0 + 4 of 2, not u0 + 1."""
    terms = sympy.Add.make_args(sympy.expand(size.node.expr))
    return all(term.as_coeff_Mul()[0].is_Integer and term.as_coeff_Mul()[0] % by == 0 for term in terms)


def _is_count(value: Any) -> bool:
    """A size or an item as it is: arithmetic on one (`x[:-k]`, `x[: n + 3]`) may leave the source, and eager cuts it
    there."""
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol


def symbolic_getitem(source: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[k]` and `x[:k]` with a size or an item k. A slice keeps k as the size of its result, so that `out[:k]` and
    `y[:k]` agree; a k beyond the end, which eager would cut, fails a condition and that batch runs the function
    itself."""
    if isinstance(index, torch.SymInt):
        return source.select(0, index)
    if isinstance(index, slice) and _is_count(index.stop) and index.start in (None, 0) and index.step in (None, 1):
        return source.narrow(0, 0, index.stop)
    return torch.Tensor.__getitem__(source, index)


def symbolic_narrow(
    source: torch.Tensor, dim: int, start: int | torch.SymInt | torch.Tensor, length: int | torch.SymInt
) -> torch.Tensor:
    """`torch.narrow` refuses a negative length; the slice that it is traced as counts one from the end."""
    if isinstance(length, torch.SymInt):
        torch._check(length >= 0)
    return torch.narrow(source, dim, start, length)


def one_hot(source: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Eager looks for the least and the largest class, a trace takes them as given."""
    if isinstance(num_classes, int) and num_classes > 0:
        demand(((source >= 0) & (source < num_classes)).all(), f"one_hot of a class outside [0, {num_classes})")
    return torch.nn.functional.one_hot(source, num_classes)


def _squeeze(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A trace takes every dynamic size as larger than 1: a batch for which one is 1, and where eager drops the
    dimension, fails the precondition that the comparison here records."""

    def squeeze(source: torch.Tensor, dim: Any = None) -> torch.Tensor:
        dims = range(source.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        for d in dims:
            if -source.dim() <= d < source.dim() and isinstance(source.shape[d], torch.SymInt):
                bool(source.shape[d] == 1)
        return original(source) if dim is None else original(source, dim)

    return squeeze


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.chunk: symbolic_chunk,
    torch.Tensor.chunk: symbolic_chunk,
    torch.Tensor.__getitem__: symbolic_getitem,
    torch.narrow: symbolic_narrow,
    torch.Tensor.narrow: symbolic_narrow,
    torch.nn.functional.one_hot: one_hot,
    torch.squeeze: _squeeze(torch.squeeze),
    torch.Tensor.squeeze: _squeeze(torch.squeeze),
    torch.Tensor.squeeze_: _squeeze(torch.Tensor.squeeze_),
}
