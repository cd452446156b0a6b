"""Capacities and what they were chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy


@dataclass
class Observed:
    """What exact runs have seen: the largest count of each symbol, and the least and largest id that entered a
    `unique`."""

    counts: dict[sympy.Symbol, int] = field(default_factory=dict)
    ids: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, counts: Mapping[sympy.Symbol, int], ids: Mapping[str, tuple[int, int]]) -> None:
        for symbol, count in counts.items():
            self.counts[symbol] = max(count, self.counts.get(symbol, 0))
        for name, (low, high) in ids.items():
            past = self.ids.get(name, (low, high))
            self.ids[name] = (min(low, past[0]), max(high, past[1]))


@dataclass(frozen=True)
class Bounds:
    """`caps` of the symbols that are sizes; `ids`: unique node -> N where its ids are taken to lie in [0, N), checked
    on the device."""

    caps: dict[sympy.Symbol, int]
    ids: dict[str, int]
    names: dict[sympy.Symbol, str]
