"""What a rule works with: caps, counts, masks, fills, the checks that make up the status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from zgcompile.errors import InternalError
from zgcompile.ir.bounded import Bounded, Number, Pad, Size, as_size
from zgcompile.ir.sizes import evaluate, upper_bound
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Check, Failure

SizeLike = int | sympy.Expr | Size


class Context:
    """The state of one run of the lowering interpreter. Counts are 0-d int64 tensors on `device`."""

    def __init__(self, caps: Mapping[sympy.Symbol, int], shape_env: Any, device: torch.device, bounds: Mapping[str, int]) -> None:
        self.caps, self.shape_env, self.device, self.id_bounds = caps, shape_env, device, bounds
        self.counts: dict[sympy.Symbol, torch.Tensor] = {}
        self.true_counts: dict[sympy.Symbol, torch.Tensor] = {}
        self.checks: list[tuple[Check, torch.Tensor]] = []
        self.compactions: dict[tuple[int, sympy.Expr], torch.Tensor] = {}
        self.key: torch.Tensor | None = None
        self._values: dict[sympy.Basic, Any] = {}
        self._masks: dict[tuple[sympy.Basic, int], torch.Tensor] = {}

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
        return count if isinstance(count, torch.Tensor) else torch.full((), count, dtype=torch.int64, device=self.device)

    def _count_of_symbol(self, symbol: sympy.Symbol) -> torch.Tensor:
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
        return mask.view([-1 if d == dim else 1 for d in range(rank)])

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

    def select(self, value: Any, fill: float | bool, dims: Iterable[int] | None = None) -> Any:
        """Data with the pads along `dims` (all dynamic ones when None) replaced by `fill`."""
        if not isinstance(value, Bounded) or (value.pad is Pad.ZERO and fill == 0):
            return self.raw(value)
        rank = value.dim()
        wanted = None if dims is None else {d % rank for d in dims}
        data = value.data
        for d in value.dynamic():
            if wanted is None or d in wanted:
                data = torch.where(self.valid(value.sizes[d], d, rank), data, torch.full((), fill, dtype=data.dtype, device=data.device))
        return data

    def all_valid(self, value: Bounded) -> torch.Tensor | None:
        """bool mask of the valid elements, broadcastable to the data; None when every element is."""
        mask = None
        for d in value.dynamic():
            along = self.valid(value.sizes[d], d, value.dim())
            mask = along if mask is None else mask & along
        return mask

    # -- status

    def check(self, flag: torch.Tensor, failure: Failure, what: str, node: Node) -> None:
        """Adds `flag` (0-d bool, True = failed) to the status."""
        where = user_line_from_stack_trace(node.meta.get("stack_trace") or "")
        self.checks.append((Check(failure, what, where), flag))

    def bind(self, node: Node, count: torch.Tensor, at: int = 0) -> None:
        """Gives the `at`-th size symbol born at `node` the true count, and checks it against the capacity."""
        symbols = list(node.meta.get("unbacked_bindings") or {})
        if at < len(symbols):
            self.bind_symbol(symbols[at], count, node)

    def bind_symbol(self, symbol: sympy.Symbol, count: torch.Tensor, node: Node) -> None:
        self.true_counts[symbol] = count
        cap = self.caps.get(symbol)
        if cap is not None:
            self.check(count > cap, Failure.CAPACITY, f"capacity of {symbol}", node)
            count = count.clamp(min=0, max=cap)
        self.counts[symbol] = count
        root = self.shape_env.replace(symbol)
        if isinstance(root, sympy.Symbol) and root not in self.counts:
            self.counts[root] = count

    # -- indices

    def index(self, node: Node, index: Bounded | torch.Tensor, index_node: Any, source_size: SizeLike) -> torch.Tensor:
        """Index values made safe: pads read element 0, negatives wrap, nothing can fault; a valid index out of range is a user error."""
        size = self.size(source_size)
        cap = self.cap(size)
        span = span_of(index_node)
        data = index.data if isinstance(index, Bounded) else index
        if data.dtype not in (torch.int64, torch.int32):
            data = data.to(torch.int64)
            index = Bounded(data, index.sizes, index.pad) if isinstance(index, Bounded) else data
        proven = span.inside(size)
        if not proven:
            limit = self.count(size)
            bad = (data < (-limit)) | (data >= limit)
            mask = self.all_valid(index) if isinstance(index, Bounded) else None
            bad = bad if mask is None else bad & mask
            self.check(bad.any(), Failure.USER_ERROR, f"index out of range in {node.target}", node)
        if isinstance(index, Bounded) and not (index.pad is Pad.ZERO or (proven and index.pad is Pad.IN_RANGE)):
            data = self.select(index, 0)
        if span.low < 0:
            data = torch.where(data < 0, data + self.count(size), data)
        if not proven or not isinstance(size, int):
            data = data.clamp(0, max(cap - 1, 0))
        return data

    def compact(self, node: Node, mask: Bounded | torch.Tensor, at: int = 0) -> torch.Tensor:
        """Flat positions of the True elements of `mask`, at the cap of the symbol that `node` gives their number."""
        output = node.meta["val"]
        output = output[0] if isinstance(output, (tuple, list)) else output
        symbols = list(node.meta.get("unbacked_bindings") or {})
        symbol = symbols[0] if symbols else next(s for s in map(self.size, output.shape[at:]) if not isinstance(s, int))
        flags = mask.data if isinstance(mask, Bounded) else mask
        key = (id(flags), symbol)
        if key not in self.compactions:
            total, flat = self._flat_mask(mask)
            positions, count = torch.ops.zgcompile.compact(flat, total, self.cap(symbol))
            if symbols:
                self.bind_symbol(symbol, count, node)
            self.compactions[key] = positions
        return self.compactions[key]

    def _flat_mask(self, mask: Bounded | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of elements that count, and the flags in one dimension: pads are behind the count or False."""
        if not isinstance(mask, Bounded):
            return torch.full((), mask.numel(), dtype=torch.int64, device=mask.device), mask.reshape(-1)
        if mask.dynamic() == [0]:
            inner = 1
            for size in mask.data.shape[1:]:
                inner *= int(size)
            return self.count_tensor(mask.sizes[0]) * inner, mask.data.reshape(-1)
        data = self.select(mask, False)
        return torch.full((), data.numel(), dtype=torch.int64, device=data.device), data.reshape(-1)


