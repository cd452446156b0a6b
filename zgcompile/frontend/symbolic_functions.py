"""Stand-ins for torch functions that decide something on a size although their result needs no such decision; for
tracing only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch


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


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.chunk: symbolic_chunk,
    torch.Tensor.chunk: symbolic_chunk,
    torch.Tensor.__getitem__: symbolic_getitem,
}
