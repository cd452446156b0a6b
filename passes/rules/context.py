"""What a rule works with: caps, counts, masks, fills, safe indices, and the checks that make up the status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from zgcompile.errors import InternalError, UnsupportedOp
from zgcompile.ir.bounded import Bounded, Number, Pad, Size, as_size
from zgcompile.ir.sizes import evaluate, upper_bound
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Check, Failure

SizeLike: TypeAlias = int | sympy.Expr | Size
IDS = (torch.int64, torch.int32)


class Context:
    """The state of one run of the lowering interpreter. Counts are 0-d int64 tensors on `device`."""

    def __init__(
        self, caps: Mapping[sympy.Symbol, int], shape_env: Any, device: torch.device, bounds: Mapping[str, int]
    ) -> None:
        self.caps, self.shape_env, self.device, self.id_bounds = caps, shape_env, device, bounds
        self.counts: dict[sympy.Symbol, torch.Tensor] = {}
        self.true_counts: dict[sympy.Symbol, torch.Tensor] = {}
        self.checks: list[tuple[Check, torch.Tensor]] = []
        self.compactions: dict[
            tuple[int, sympy.Expr], tuple[torch.Tensor, torch.Tensor]
        ] = {}  # (mask kept alive, positions)
        self.cleaned: list[Bounded] = []  # values whose pads some rule had to make zero
        self.key: torch.Tensor | None = None
        self._values: dict[sympy.Basic, Any] = {}
        self._masks: dict[tuple[sympy.Basic, int], torch.Tensor] = {}
        self._same: set[frozenset[Any]] = set()  # pairs of sizes that the status compares already

    # -- sizes

    def size(self, size: SizeLike | torch.SymInt) -> int | sympy.Expr:
        """A size in its simplest form: an int where the ShapeEnv knows it."""
        if isinstance(size, torch.SymInt):
            size = as_size(size)
        expr = size.expr if isinstance(size, Size) else size
        if isinstance(expr, int):
            return expr
        expr = self.shape_env.replace(expr)
        return int(expr) if expr.is_Integer else expr

    def cap(self, size: SizeLike | torch.SymInt) -> int:
        return upper_bound(self.size(size), self.caps)

    def caps_of(self, sizes: Iterable[SizeLike | torch.SymInt]) -> list[int]:
        return [self.cap(s) for s in sizes]

    def count(self, size: SizeLike | torch.SymInt) -> torch.Tensor | int:
        """The true size, clamped to what the buffers hold."""
        expr = self.size(size)
        return expr if isinstance(expr, int) else evaluate(expr, self._count_of_symbol, self._values)  # type: ignore[return-value]

    def count_tensor(self, size: SizeLike | torch.SymInt) -> torch.Tensor:
        count = self.count(size)
        return (
            count if isinstance(count, torch.Tensor) else torch.full((), count, dtype=torch.int64, device=self.device)
        )

    def elements(self, sizes: Iterable[SizeLike]) -> torch.Tensor:
        """The true number of elements of these dimensions."""
        count = torch.ones((), dtype=torch.int64, device=self.device)
        for size in sizes:
            count = count * self.count(size)
        return count

    def true_count(self, symbol: sympy.Symbol) -> torch.Tensor:
        """The unclamped value of a symbol, for the conditions of the trace."""
        known = self.true_counts.get(symbol)
        return known if known is not None else self.count_tensor(symbol)

    def _count_of_symbol(self, symbol: sympy.Symbol) -> torch.Tensor:
        if symbol not in self.counts and not symbol.is_integer:
            raise UnsupportedOp(
                "a size made from a float of the device",
                advice="keep the value a tensor, or make the size from counts",
            )
        if symbol not in self.counts:
            raise InternalError(f"the size symbol {symbol} is used before it is bound")
        return self.counts[symbol]

    def valid(self, size: SizeLike | torch.SymInt, dim: int = 0, rank: int = 1) -> torch.Tensor:
        """bool mask of the valid indices of a dimension, shaped to broadcast at `dim` of a rank-`rank` tensor."""
        expr = self.size(size)
        cap = self.cap(expr)
        mask = self._masks.get((sympy.sympify(expr), cap))
        if mask is None:
            mask = torch.arange(cap, device=self.device) < self.count(expr)
            self._masks[(sympy.sympify(expr), cap)] = mask
        return along(mask, dim, rank)

    # -- values

    def raw(self, value: Any) -> Any:
        """Arguments with data for bounded tensors and caps for sizes."""

        def one(v: Any) -> Any:
            if isinstance(v, Bounded):
                return v.data
            return self.cap(v) if isinstance(v, Size) else v.value if isinstance(v, Number) else v

        return tree_map(one, value, is_leaf=lambda v: isinstance(v, (Bounded, Size, Number)))

    def scalar(self, value: Any) -> Any:
        """A scalar argument as data: the count of a size, the device value of a number."""
        return self.count(value) if isinstance(value, Size) else value.value if isinstance(value, Number) else value

    def sizes_of(self, value: Bounded | torch.Tensor) -> tuple[int | sympy.Expr, ...]:
        return value.sizes if isinstance(value, Bounded) else tuple(value.shape)

    def bounded(self, value: Bounded | torch.Tensor) -> Bounded:
        """A static tensor seen as a bounded one without pads."""
        return value if isinstance(value, Bounded) else Bounded(value, tuple(value.shape), Pad.ZERO)

    def select(self, value: Any, fill: float | bool, dims: Iterable[int] | None = None) -> Any:
        """Data with the pads along `dims` (all dynamic ones when None) replaced by `fill`."""
        if not isinstance(value, Bounded) or (value.pad is Pad.ZERO and fill == 0):
            return self.raw(value)
        rank = value.dim()
        wanted = None if dims is None else {d % rank for d in dims}
        if fill == 0 and (wanted is None or wanted.issuperset(value.dynamic())):
            self.cleaned.append(value)
        data = value.data
        for d in value.dynamic():
            if wanted is None or d in wanted:
                data = torch.where(
                    self.valid(value.sizes[d], d, rank),
                    data,
                    torch.full((), fill, dtype=data.dtype, device=data.device),
                )
        return data

    def all_valid(self, value: Bounded | torch.Tensor) -> torch.Tensor | None:
        """bool mask of the valid elements, broadcastable to the data; None when every element is."""
        if not isinstance(value, Bounded):
            return None
        mask = None
        for d in value.dynamic():
            valid = self.valid(value.sizes[d], d, value.dim())
            mask = valid if mask is None else mask & valid
        return mask

    # -- status

    def check(self, flag: torch.Tensor, failure: Failure, what: str, node: Node) -> None:
        """Adds `flag` (0-d bool, True = failed) to the status."""
        where = user_line_from_stack_trace(node.meta.get("stack_trace") or "")
        self.checks.append((Check(failure, what, where), flag))

    def check_not_empty(self, node: Node, sizes: Iterable[int | sympy.Expr]) -> None:
        """Where eager refuses to reduce no elements, so does the status."""
        dynamic = [s for s in sizes if not isinstance(s, int)]
        if dynamic:
            self.check(self.elements(dynamic) == 0, Failure.USER_ERROR, f"{node.target} over no elements", node)

    def bind_symbol(self, symbol: sympy.Symbol, count: torch.Tensor, node: Node) -> None:
        """Gives a size symbol born at `node` its true count, and checks it against the capacity."""
        self.true_counts[symbol] = count
        root = self.shape_env.replace(symbol)
        if root.free_symbols <= self.caps.keys():
            cap = self.cap(symbol)
            self.check(count > cap, Failure.CAPACITY, f"capacity of {symbol}", node)
            if root != symbol and root.free_symbols <= self.counts.keys():
                # The trace took the two sizes as one: the buffers go by the count that was there first.
                self.check(count != self.count(root), Failure.PRECONDITION, f"{symbol} == {root}", node)
            count = count.clamp(min=0, max=cap)
        self.counts[symbol] = count
        if isinstance(root, sympy.Symbol):
            self.counts.setdefault(root, count)

    def bind_output(self, node: Node, count: torch.Tensor, output: Any, dim: int) -> None:
        """The size of `output` along `dim` is `count`: binds its symbol if it is new, else checks that the trace's size
        holds.

        A trace takes sizes as at least 2, so it sizes `x[:2]` as 2 rows even where the batch has one."""
        size = self.size(output.shape[dim])
        born = node.meta.get("unbacked_bindings") or {}
        symbol = as_size(output.shape[dim])
        if isinstance(symbol, sympy.Symbol) and symbol in born and symbol not in self.counts:
            self.bind_symbol(symbol, count, node)
        else:
            self.check(count != self.count(size), Failure.PRECONDITION, f"a size of {size}", node)

    # -- sizes that have to agree

    def check_same(self, node: Node, a: SizeLike, b: SizeLike) -> None:
        """Eager broadcasts where one of two sizes is 1 and raises where they differ otherwise; the trace took them as
        one. Sizes that are the same expression cost nothing."""
        a, b = self.size(a), self.size(b)
        pair = frozenset((a, b))
        if a == b or pair in self._same or (isinstance(a, int) and isinstance(b, int)):
            return
        self._same.add(pair)
        self.check(self.count_tensor(a) != self.count(b), Failure.PRECONDITION, f"{a} == {b}", node)

    def fitted(self, value: Any, sizes: Sequence[SizeLike | torch.SymInt]) -> Any:
        """The data at the caps of `sizes`, aligned at the last dimension: sizes that are equal only by a condition of
        the trace (`x[1:] - x[:-1]`) may have other caps. Where the condition fails, so does the status."""
        data = self.raw(value)
        if not isinstance(data, torch.Tensor) or data.dim() > len(sizes):
            return data
        for back, own in enumerate(reversed(self.sizes_of(value)), 1):
            wanted = self.size(sizes[-back])
            if own == 1 or (isinstance(own, int) and isinstance(wanted, int)):
                continue
            size, cap = data.shape[-back], self.cap(wanted)
            if size > cap:
                data = data.narrow(-back, 0, cap)
            elif size < cap:
                data = torch.constant_pad_nd(data, [0, 0] * (back - 1) + [0, cap - size])
        return data

    def aligned(self, node: Node, value: Any, sizes: Sequence[SizeLike]) -> Any:
        """The data of a tensor that broadcasts to `sizes`, in this batch as in the trace, at their caps."""
        for own, wanted in zip(reversed(self.sizes_of(value)), reversed(sizes), strict=False):
            if own != 1:
                self.check_same(node, own, wanted)
        return self.fitted(value, sizes)

    # -- indices

    def index(
        self, node: Node, index: Bounded | torch.Tensor, index_node: Any, source_size: SizeLike, wraps: bool = False
    ) -> torch.Tensor:
        """Index values that cannot fault: pads read element 0, whatever is out of range is clamped into the buffer.

        A valid index out of range is a user error. `wraps`: the op takes negative indices from the end, the true one.
        The clamp stays where a value range is proven: once another check has failed, a "valid" value may have been read
        from a pad.
        """
        size = self.size(source_size)
        span = span_of(index_node)
        bounded = self.bounded(index)
        if bounded.dtype not in IDS:
            bounded = Bounded(bounded.data.to(torch.int64), bounded.sizes, bounded.pad)
        data = bounded.data
        if not span.inside(size):
            limit = self.count(size)
            bad = (data < (-limit if wraps else 0)) | (data >= limit)
            mask = self.all_valid(bounded)
            self.check(
                (bad if mask is None else bad & mask).any(),
                Failure.USER_ERROR,
                f"index out of range in {node.target}",
                node,
            )
        if bounded.pad is Pad.ANY:
            data = self.select(bounded, 0)
        if wraps and span.low < 0:
            data = torch.where(data < 0, data + self.count(size), data)
        return data.clamp(0, max(self.cap(size) - 1, 0))


def along(values: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """A 1-D tensor shaped to broadcast at `dim` of a rank-`rank` tensor."""
    return values.view([-1 if d == dim % rank else 1 for d in range(rank)])


def rows_at(data: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """`data.index_select(dim, rows)` with the rows brought into the buffer."""
    return data.index_select(dim, rows.clamp(0, max(data.shape[dim] - 1, 0)))
