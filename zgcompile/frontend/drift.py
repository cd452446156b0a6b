"""Whether calls still fit the envelope as its fit said."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from zgcompile.ir.envelope import EnvelopeFit
from zgcompile.ir.status import MetadataLayout
from zgcompile.ir.tail import binomial_cdf

FEWEST_OVERFLOWS = 3
WINDOW = 1024  # calls
BY_CHANCE = 1e-3  # a re-capture costs thousands of steps
HEADROOM_BOUND = 1e-2  # the overflow rate that capacities by headroom may have
SHORT_LIVED = 1000  # calls


class Drift:
    """The calls since a fit, at most the last 1024, and how many of them overflowed.

    They have drifted when at least `needed` overflowed, more than the fit's bound explains. A fit that did not last has
    the next one wait for twice as many, so that sizes that cannot be held do not end in one capture after the other.
    """

    def __init__(self, fit: EnvelopeFit | None, before: Drift | None = None) -> None:
        self.total = 0
        bound, target = (fit.bound, fit.target) if fit is not None else (None, None)
        self.bound = HEADROOM_BOUND if bound is None else max(bound, target or 0.0)
        self.needed = FEWEST_OVERFLOWS
        if before is not None and before.total < SHORT_LIVED:
            self.needed = 2 * before.needed
        self.overflows: deque[bool] = deque(maxlen=WINDOW)
        self.counts: deque[Any] = deque(maxlen=WINDOW)

    def replayed(self, metadata: Sequence[int]) -> None:
        """A call that fitted; its metadata buffer, read only by `calls`."""
        self.total += 1
        self.overflows.append(False)
        self.counts.append(metadata)

    def overflowed(self, counts: Mapping[sympy.Symbol, int] | None) -> bool:
        """A call that did not; its exact counts, where it has them. True: re-fit."""
        self.total += 1
        self.overflows.append(True)
        self.counts.append(counts)
        over, calls = sum(self.overflows), len(self.overflows)
        return over >= self.needed and 1 - binomial_cdf(over - 1, calls, self.bound) < BY_CHANCE

    def calls(self, layout: MetadataLayout) -> list[Mapping[sympy.Symbol, int]]:
        """The counts of each call, all exact."""
        return [layout.count_values(c) if isinstance(c, list) else c for c in self.counts if c is not None]
