"""Random batches for dry runs of the sampling prefix, from what the calls at exact sizes have shown of each argument.

Three calls show a few hundred ids of maybe millions: drawing from those alone would make the batches too much alike. An
integer argument with one dimension is therefore taken for ids and drawn uniformly; without replacement, where no batch
had one twice. They come from [0, rows of the table that they index) where those seen could well be such a draw, which
gives the same batches, and so the same capacities and compiled code, whatever the first batches were; else from [least
seen, largest seen]. Of every other argument rows of the current batch are drawn. What is neither is refused: a sorted
argument may be offsets into another one, and integers of two dimensions may mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

SORTED_BY_CHANCE = 8  # pairs of neighbours in order that a random argument does not show
UNLIKELY = 1e-3  # of ids drawn from a whole table: that none is below the least seen, or none above the largest


@dataclass(frozen=True)
class SeenIds:
    """Of an integer argument: its `number` ids lie in [low, high], `distinct` in each batch; `ascending`: neighbours,
    all in order."""

    number: int
    low: int
    high: int
    distinct: bool
    ascending: int | None

    @staticmethod
    def of(ids: torch.Tensor) -> SeenIds:
        low, high = torch.aminmax(ids)
        ordered = bool((ids[1:] >= ids[:-1]).all())
        distinct = torch.unique(ids).numel() == ids.numel()
        return SeenIds(ids.numel(), int(low), int(high), distinct, ids.numel() - 1 if ordered else None)

    def union(self, other: SeenIds) -> SeenIds:
        ascending = None if self.ascending is None or other.ascending is None else self.ascending + other.ascending
        low, high = min(self.low, other.low), max(self.high, other.high)
        return SeenIds(self.number + other.number, low, high, self.distinct and other.distinct, ascending)

    def over(self, rows: int) -> SeenIds:
        """Ids over a whole table where those seen could be a uniform draw from it, else these."""
        if not 0 <= self.low <= self.high < rows:
            return self
        below, above = self.low / rows, (rows - 1 - self.high) / rows
        likely = min((1 - below) ** self.number, (1 - above) ** self.number) > UNLIKELY
        return replace(self, low=0, high=rows - 1) if likely else self


@dataclass(frozen=True)
class BatchPool:
    """`seen` by argument; None for an argument that is not integer, or has not one dimension."""

    seen: tuple[SeenIds | None, ...] | None = None

    def including(self, arguments: Sequence[torch.Tensor]) -> BatchPool:
        """This pool and one more batch; a tensor with rows is not empty."""
        now = tuple(SeenIds.of(t) if _is_integer(t) and t.dim() == 1 else None for t in arguments)
        if self.seen is None:
            return BatchPool(now)
        return replace(
            self, seen=tuple(b if a is None or b is None else a.union(b) for a, b in zip(self.seen, now, strict=True))
        )

    def over_tables(self, rows: Mapping[int, int]) -> BatchPool:
        """This pool with each argument's ids over the table that it indexes; `rows` by argument."""
        assert self.seen is not None
        return BatchPool(tuple(s.over(rows[i]) if s is not None and i in rows else s for i, s in enumerate(self.seen)))

    def refusal(self, index: int, tensor: torch.Tensor, rows: int) -> str | None:
        """Why `rows` rows of argument `index`, such as `tensor`, cannot be drawn; None where they can."""
        assert self.seen is not None
        ids = self.seen[index]
        if _is_integer(tensor) and tensor.dim() > 1:
            return "holds integers in more than one dimension"
        if ids is None:
            return None
        if ids.ascending is not None and ids.ascending >= SORTED_BY_CHANCE:
            return "is sorted in every batch"
        if ids.high - ids.low >= 2**63 - 1:
            return "holds numbers that are no ids"
        if ids.distinct and ids.high - ids.low + 1 < rows:
            return f"has fewer than {rows} ids"
        return None

    def draw(self, index: int, tensor: torch.Tensor, rows: int, generator: np.random.Generator) -> torch.Tensor:
        """`rows` random rows for argument `index`, on the device of `tensor`, its value in the current batch."""
        assert self.seen is not None
        ids = self.seen[index]
        if tensor.dim() == 0:
            return tensor
        if ids is None:
            chosen = torch.from_numpy(generator.integers(tensor.shape[0], size=rows))
            return tensor.detach()[chosen.to(tensor.device)]
        if ids.distinct:
            drawn = generator.choice(ids.high - ids.low + 1, rows, replace=False) + ids.low
        else:
            drawn = generator.integers(ids.low, ids.high, rows, endpoint=True)
        return torch.from_numpy(drawn).to(device=tensor.device, dtype=tensor.dtype)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
