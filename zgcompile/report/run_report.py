"""The report of `zgcompile run`: host round trips, times, parity and envelope of each step that a script ran."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from zgcompile.errors import VerificationFailed
from zgcompile.frontend.stats import Stats
from zgcompile.ir.program import RoundTrip
from zgcompile.report.measured_step import MeasuredStep


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: the median of `runs`, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing | None:
        if not seconds:
            return None
        ms = sorted(1e3 * s for s in seconds)
        last = len(ms) - 1
        return cls(statistics.median(ms), ms[round(0.1 * last)], ms[round(0.9 * last)], len(ms))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.runs} runs)"


@dataclass(frozen=True)
class Waiting:
    """`count` host reads a step by `op` at `where` ("file:line") with source `text`; `instead`: what the compiled step
    does."""

    where: str
    text: str
    op: str
    count: int
    instead: str

    @classmethod
    def grouped(cls, trips: Sequence[RoundTrip]) -> list[Waiting]:
        counts: Counter[tuple[str, str, str, str]] = Counter()
        for trip in trips:
            where, text = ("?", "") if trip.where is None else (str(trip.where), trip.where.text)
            counts[where, text, trip.op, trip.replaced_by] += trip.count
        return [cls(where, text, op, count, instead) for (where, text, op, instead), count in counts.items()]


@dataclass(frozen=True)
class StepReport:
    """One step of the script. `reads_after`: status reads a replay; `deferred`: returned numbers that the script read,
    a call."""

    name: str
    where: str
    device: str
    stats: Stats
    round_trips: list[Waiting]
    reads_after: int
    deferred: float
    eager: Timing | None
    compiled: Timing | None
    parity_error: float | None
    parity_compared: int
    parity_note: str

    @classmethod
    def of(cls, measured: MeasuredStep) -> StepReport:
        stats = measured.step.stats
        specialisation = measured.step.specialisations[0]
        parity = measured.parity
        return cls(
            name=measured.__name__,  # type: ignore[attr-defined]
            where=str(measured.where),
            device=str(specialisation.captured.device),
            stats=stats,
            round_trips=Waiting.grouped(specialisation.program.round_trips),
            reads_after=math.ceil(stats.host_reads / stats.replays) if stats.replays else 0,
            deferred=stats.deferred_reads / stats.calls if stats.calls else 0.0,
            eager=Timing.of(measured.eager),
            compiled=Timing.of(measured.compiled),
            parity_error=None if parity is None or not parity.entries else parity.max_error,
            parity_compared=0 if parity is None else len(parity.entries),
            parity_note=measured.parity_note or (parity.note if parity is not None else ""),
        )

    @property
    def reads_before(self) -> int:
        return sum(trip.count for trip in self.round_trips)

    @property
    def speedup(self) -> float | None:
        return self.eager.median / self.compiled.median if self.eager and self.compiled else None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; what was not measured is None, an infinite error the string "inf"."""
        data = asdict(self)
        stats = data.pop("stats")
        data["envelope"] = list(stats.pop("envelope").values())
        if self.parity_error is not None and not math.isfinite(self.parity_error):
            data["parity_error"] = str(self.parity_error)
        return data | stats | {"reads_before": self.reads_before, "speedup": self.speedup}

    def tables(self) -> Iterator[RenderableType]:
        yield self._round_trip_table()
        yield self._summary_table()
        if self.stats.envelope:
            yield self._envelope_table()

    def _round_trip_table(self) -> Table:
        table = Table(title=f"{self.name}: host round trips a step")
        table.add_column("line", no_wrap=True)
        table.add_column("op")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        table.add_column("in the compiled step")
        none, reads = ("0", str(self.reads_after)) if self.stats.replays else ("-", "-")
        for trip in self.round_trips:
            table.add_row(_short(trip.where), trip.op, str(trip.count), none, trip.instead)
        table.add_row("status of the step", "read", "", reads, "one record, polled by the host")
        table.add_section()
        table.add_row("all", "", str(self.reads_before), reads, "")
        return table

    def _summary_table(self) -> Table:
        table = Table(title=f"{self.name} ({_short(self.where)}) on {self.device}", show_header=False)
        table.add_column()
        table.add_column()
        stats = self.stats
        table.add_row("ms a step, eager", str(self.eager or "not measured"))
        table.add_row(
            "ms a step, compiled", str(self.compiled or f"not measured: {stats.replays} replays in {stats.calls} calls")
        )
        if self.speedup is not None:
            table.add_row("speedup", f"{self.speedup:.2f}x")
        error = (
            "not checked"
            if self.parity_error is None
            else f"largest relative error {self.parity_error:.1e} in {self.parity_compared} comparisons"
        )
        table.add_row("parity", f"{error}; {self.parity_note}" if self.parity_note else error)
        table.add_row("calls", f"{stats.calls}: {stats.replays} replays, {stats.eager_runs} at exact sizes")
        table.add_row("captures", f"{stats.captures} ({stats.traces} traces)")
        table.add_row("overflows, preconditions", f"{stats.overflows}, {stats.preconditions}")
        if stats.deferred_reads:
            table.add_row("numbers read by the script", f"{self.deferred:.2f} a call")
        return table

    def _envelope_table(self) -> Table:
        table = Table(title=f"{self.name}: envelope")
        table.add_column("size born at")
        table.add_column("used", justify="right")
        table.add_column("held", justify="right")
        table.add_column("filled", justify="right")
        for use in self.stats.envelope.values():
            table.add_row(_short(use.name), str(use.used), str(use.held), f"{use.used / use.held:.0%}")
        return table


def _short(where: str) -> str:
    """ "file:line" without the folders, which would push all else off a narrow terminal; JSON has them."""
    return where.rpartition(os.sep)[2]


@dataclass
class RunReport:
    """What a script's run showed. `exit_code` is the script's own; `failures` are the steps that differ from eager."""

    script: str
    exit_code: int
    steps: list[StepReport] = field(default_factory=list)
    failures: list[VerificationFailed] = field(default_factory=list)

    def tables(self) -> Iterator[RenderableType]:
        for step in self.steps:
            yield from step.tables()

    def as_dict(self) -> dict[str, Any]:
        return {"script": self.script, "exit_code": self.exit_code, "steps": [step.as_dict() for step in self.steps]}
