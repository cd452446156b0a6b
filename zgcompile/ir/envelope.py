"""The envelope: a capacity for every dynamic dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from zgcompile.errors import BadInput
from zgcompile.ir.tail import CONFIDENCE, ROWS_PER_TILE

DEFAULT_HEADROOM = 1.1  # where no probability can be stated


class EnvelopeWarning(UserWarning):
    """What an envelope asks for cannot be had: a probability, or a capacity of a size that the step does not have."""


@dataclass(frozen=True)
class Envelope:
    """How capacities are chosen.

    `max_overflow_probability`: a batch outgrows any of them with at most this probability, at 99 % confidence, judged
    by running the sampling alone on random batches (`EnvelopeFit` says how well that went). "auto", the default, takes
    the probability that costs least, re-runs against pad rows. `headroom` instead: the largest count seen times it,
    rounded up to 64. With 1.1 it is also what happens where no probability can be stated; a warning says so where one
    was asked for. Never above what is provable.

    `caps` overrides single sizes by the user's line: `Envelope(caps={"train.py:31": 4096})`; the key is the end of
    "file:line", or "file:line #2" for the second size that the line makes (`stats.envelope` has the names; a key that
    is none of them draws a warning).

    `batches` gives the batches to judge by, `batches=lambda: loader`: a callable without arguments whose result yields
    the step's arguments (a tensor, or a tuple of them). Host and CUDA generators are put back afterwards. Without it,
    ids are drawn uniformly: over the table that they index where those seen look like that, else between the least and
    largest seen. An id that is no valid one ends the dry runs, not the process: each index is checked first.

    Raises:
        BadInput: a headroom and a probability together, a headroom below 1, a probability outside (0, 1), a capacity
        below 1.
    """

    headroom: float | None = None
    max_overflow_probability: float | str | None = None  # None, without a headroom: the one that costs least
    caps: Mapping[str, int] = field(default_factory=dict)
    batches: Callable[[], Iterable[Any]] | None = None

    def __post_init__(self) -> None:
        p = self.max_overflow_probability
        if self.headroom is not None and p is not None:
            raise BadInput(
                f"Envelope(headroom={self.headroom}, max_overflow_probability={p}) gives two ways to choose capacities",
                advice="keep one of them",
            )
        if isinstance(p, str):
            if p != "auto":
                raise BadInput(f"Envelope(max_overflow_probability={p!r})", advice='write a probability or "auto"')
            object.__setattr__(self, "max_overflow_probability", None)
            p = None
        if self.headroom is not None and not self.headroom >= 1.0:
            raise BadInput(f"Envelope(headroom={self.headroom}) is below 1", advice="use a factor such as 1.1")
        if p is not None and not 0 < p < 1:
            raise BadInput(
                f"Envelope(max_overflow_probability={p}) is not between 0 and 1",
                advice="use a probability such as 1e-3",
            )
        if self.batches is not None and not callable(self.batches):
            raise BadInput(
                f"Envelope(batches=...) is a {type(self.batches).__name__}, not a callable",
                advice="write batches=lambda: loader",
            )
        for line, cap in self.caps.items():
            if not isinstance(line, str):
                raise BadInput(f"Envelope(caps={{{line!r}: ...}}) is no line", advice='write caps={"file.py:31": 4096}')
            if not isinstance(cap, int) or cap < 1:
                raise BadInput(
                    f"Envelope(caps={{{line!r}: {cap}}}) is not a positive whole number",
                    advice='write caps={"file.py:31": 4096}',
                )

    @property
    def probability(self) -> float | None:
        """The probability asked for; None where headroom or cost decides."""
        asked = self.max_overflow_probability
        return None if isinstance(asked, str) else asked

    def fitted(self, seen: int, provable: int | None) -> int:
        """The capacity for a size whose largest observed count is `seen` and which never exceeds `provable`."""
        grown = math.ceil(seen * (self.headroom or DEFAULT_HEADROOM))
        cap = max(ROWS_PER_TILE, -(-grown // ROWS_PER_TILE) * ROWS_PER_TILE)
        return max(cap if provable is None else min(cap, provable), 1)

    def capacity(self, symbol: sympy.Symbol, seen: int, provable: int | None) -> int:
        """The capacity of one size symbol."""
        del symbol
        return self.fitted(seen, provable)

    def override(self, name: str) -> int | None:
        """The user's capacity for the size of that name, if any; one for the size alone before one for its line."""
        line, _, number = name.partition(" #")
        for called in (f"{line} #{number or 1}", line):
            for key, cap in self.caps.items():
                if called.endswith(key):
                    return cap
        return None

    def unused(self, names: Iterable[str]) -> list[str]:
        """Keys of `caps` that are none of these sizes."""
        called = [c for name in names for c in (f"{name} #1", name, name.partition(" #")[0])]
        return [key for key in self.caps if not any(c.endswith(key) for c in called)]


@dataclass(frozen=True)
class FittedEnvelope(Envelope):
    """An envelope whose capacities were fitted: `rows` by size symbol, all else by headroom."""

    rows: Mapping[sympy.Symbol, int] = field(default_factory=dict)

    def capacity(self, symbol: sympy.Symbol, seen: int, provable: int | None) -> int:
        rows = self.rows.get(symbol)
        if rows is None:
            return self.fitted(seen, provable)
        return max(rows if provable is None else min(rows, provable), 1)


@dataclass(frozen=True)
class EnvelopeFit:
    """How well the capacities in use are known.

    A batch outgrows one of them with probability `estimated`, at most `bound` at 99 % confidence; `target` is what was
    asked for, or chosen by cost. `extrapolated`: there are too few batches to show it, so that `bound` holds if the
    tail goes on as fitted; `any_law` is the bound that holds whatever it does. `batches`: how many were counted.
    `source`: "random batches", "given batches", "calls" (a re-fit from what calls have needed), "fixed" (every size
    follows from the batch's length) or "headroom", for `reason`.
    """

    source: str
    target: float | None = None
    estimated: float | None = None
    bound: float | None = None
    any_law: float | None = None
    batches: int = 0
    extrapolated: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if self.bound is None:
            return f"largest seen x {DEFAULT_HEADROOM}: {self.reason}"
        if self.source == "fixed":
            return "no overflow by batches no longer than seen: every size follows from their length"
        law = f" if the tail goes on as fitted, {self.any_law:.1e} whatever it does" if self.extrapolated else ""
        rest = f"; {self.reason}" if self.reason else ""
        return (
            f"overflow probability {self.estimated:.1e}, at {CONFIDENCE:.0%} confidence at most {self.bound:.1e}{law} "
            f"(target {self.target:.1e}, {self.batches} {self.source}{rest})"
        )
