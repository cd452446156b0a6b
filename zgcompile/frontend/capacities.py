"""The envelope of a captured step over its life: fitted, kept while calls bear it out, then fitted anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from zgcompile.backend.replay import Launch
from zgcompile.frontend.batch_pool import BatchPool
from zgcompile.frontend.calibration import Calibrator, Counts, DryRun
from zgcompile.frontend.drift import Drift
from zgcompile.frontend.user_warning import warn_user
from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import Envelope, EnvelopeFit, EnvelopeWarning
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.program import StepProgram
from zgcompile.ir.source import code_line

MANY_OVERFLOWS = 8  # in a row
KEPT = 16  # calls at exact sizes, for comparison with random batches


class Capacities:
    """`record` is the fit in use, None before the first one and for `Envelope(headroom=)`.

    A shallow copy is independent but for the replays that it has noted: all other state is replaced, never changed.
    """

    def __init__(self, program: StepProgram, envelope: Envelope, fn: Callable[..., Any]) -> None:
        self.calibrator, self.asked, self.fn = Calibrator(program, envelope), envelope, fn
        self.fitted: Envelope | None = None
        self.record: EnvelopeFit | None = None
        self.pool = BatchPool()
        self.exact: tuple[Counts, ...] = ()
        self.drift = Drift(None)
        self.said_too_small, self.too_small = False, ""
        names = self.calibrator.names.values() if envelope.caps else ()
        for key in envelope.unused(names):
            warn_user(
                f"{code_line(fn)}: Envelope(caps={{{key!r}: ...}}) names no size of this step, whose sizes are: "
                f"{'; '.join(names) or 'none'}",
                EnvelopeWarning,
            )

    # -- what calls show

    def ran_exactly(self, arguments: Sequence[torch.Tensor], counts: Counts | None) -> None:
        """A call at exact sizes; without counts, one of the user's function."""
        if self.asked.headroom is None:
            self.pool = self.pool.including(arguments)
            if counts is not None:
                self.exact = (*self.exact, counts)[-KEPT:]

    def warn_of_overflows(self, in_a_row: int) -> None:
        """Once, that calls do not fit. In front of a call: a warning may be an error, and must find nothing changed."""
        text = self.too_small
        if in_a_row >= MANY_OVERFLOWS:
            text = text or (
                f"{code_line(self.fn)}: {in_a_row} calls in a row needed more than the capacities hold, and ran at "
                "exact sizes\n  instead: pass batches of one length, or Envelope(headroom=) with a larger factor"
            )
        if text and not self.said_too_small:
            self.said_too_small = True
            warn_user(text, EnvelopeWarning)

    def measured(self, counts: Counts) -> None:
        """What a batch needs that has been counted without a call."""
        if self.asked.headroom is None:
            self.exact = (*self.exact, counts)[-KEPT:]

    def overflowed(self, lowered: LoweredStep, observed: Observed, counts: Counts | None) -> bool:
        """A call that `lowered` could not hold and its exact counts. True when the calls have drifted: capture anew.
        A capacity of the user's own that is too small is not mended by that."""
        over = {s for s, cap in lowered.caps.items() if counts is not None and counts.get(s, 0) > cap}
        names = self.calibrator.names
        if over and all(self.asked.override(names.get(s, "")) is not None for s in over):
            if not self.said_too_small:
                symbol = min(over, key=str)
                self.too_small = (
                    f"{names[symbol]} has {lowered.caps[symbol]} rows by Envelope(caps=), and a call needed "
                    f"{counts[symbol]}: such calls run at exact sizes"  # type: ignore[index]
                )
            return False
        if not self.drift.overflowed(counts):
            return False
        self.fitted = None
        lengths = self._lengths(observed)
        if all(rows <= lowered.caps.get(symbol, rows) for symbol, rows in lengths.items()):
            self.fitted, self.record = self.calibrator.from_calls(self.drift.calls(lowered.layout))
        return True

    # -- fitting

    def fit(self, launch: Launch, lifted: Sequence[torch.Tensor], device: torch.device, observed: Observed) -> Envelope:
        """The envelope for a new capture. A capture for another reason than capacities keeps the fit."""
        if self.fitted is None:
            if self.pool.seen is None:
                self.pool = self.pool.including(launch.arguments)
            lengths, full = self._lengths(observed), self._full(observed)
            run = DryRun(launch, [t.detach() for t in lifted], self.pool, list(lengths.values()), device)
            self.fitted, self.record = self.calibrator.dry(run, observed, full)
            self._warn_if_denied()
        self.drift = Drift(self.record, self.drift if self.drift.total else None)
        return self.fitted

    def _warn_if_denied(self) -> None:
        p, record = self.asked.probability, self.record
        if p is None or record is None:
            return
        if record.source == "headroom":
            denied = f"no overflow probability can be stated, capacities are the {record}"
        elif record.bound is not None and record.bound > p:
            denied = f"an overflow probability of {p} cannot be stated: {record}"
        else:
            return
        warn_user(f"{code_line(self.fn)}: {denied}", EnvelopeWarning)

    def lacks_counts(self, observed: Observed) -> bool:
        """No batch of the largest length has been counted."""
        return self.asked.headroom is None and not self._full(observed)

    def _full(self, observed: Observed) -> list[Counts]:
        lengths = self._lengths(observed)
        return [c for c in self.exact if all(c.get(symbol) == rows for symbol, rows in lengths.items())]

    def _lengths(self, observed: Observed) -> Mapping[sympy.Symbol, int]:
        """The largest length seen of each group of arguments, in order."""
        return {symbol: observed.counts[symbol] for symbol in self.calibrator.lengths if symbol in observed.counts}
