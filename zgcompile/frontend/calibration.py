"""From batches that are only counted to capacities with a stated overflow probability."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import sympy
import torch

from zgcompile.backend.checked_indices import direct_limits
from zgcompile.backend.replay import Launch
from zgcompile.frontend.batch_pool import BatchPool
from zgcompile.frontend.given_batches import given_batches
from zgcompile.frontend.host_random import HostRandom
from zgcompile.frontend.prefix import SamplingPrefix, value_inputs
from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import DEFAULT_HEADROOM, Envelope, EnvelopeFit, FittedEnvelope
from zgcompile.ir.program import StepProgram
from zgcompile.ir.tail import ROWS_PER_TILE, JointFit, fit_joint
from zgcompile.keyed_numbers import step_key
from zgcompile.pipeline import names_of_sizes, size_symbols

DRY_SEED = 0x5EED  # fixed, so that the same step gets the same capacities
FEWEST = 64  # batches
ASKED = (2048, 4.0)  # batches and seconds of this thread where a probability was asked for
DEFAULT = (256, 4.0)  # where it was not: enough for a slow host, as fewer batches are other capacities and no cache hit
PROBABILITIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# A re-run at exact sizes, in replays: eager took 8 to 10 times the replay on a large GPU; the failed replay is lost
# too.
RERUN = 10
WAITING = 4  # seconds of the clock count as one of the thread: others on the machine are not to decide how much is seen
FAR = 4.0  # standard errors by which calls may need more than random batches; with a share, as a size may hardly vary
FAR_SHARE = 0.002
FAR_BELOW = 8.0  # standard deviations by which they may need less, which costs pads and no more
FAR_SHARE_BELOW = 0.02
LARGEST_RATIO = 2  # of a capacity that nobody asked for to what calls have needed
STATE_DECIDES = "no size depends on the batch and on nothing that the step changes"

Counts = Mapping[sympy.Symbol, int]


class CannotCalibrate(Exception):
    """`reason`: why no probability can be stated."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TooSlow(CannotCalibrate):
    """Other batches would take as long."""


@dataclass(frozen=True)
class DryRun:
    """What the prefix runs on besides its batches: a call's launch, the lifted tensors, the capacity of each length."""

    launch: Launch
    lifted: Sequence[torch.Tensor]
    pool: BatchPool
    rows: Sequence[int]
    device: torch.device


class Calibrator:
    """Fits the envelope of one captured step; keeps nothing from fit to fit."""

    def __init__(self, program: StepProgram, envelope: Envelope) -> None:
        self.program, self.envelope = program, envelope

    @cached_property
    def lengths(self) -> list[sympy.Symbol]:
        """The symbol of each length of the arguments, in order."""
        nodes = self.program.fx_graph.graph.nodes
        return [
            next(iter(n.meta["unbacked_bindings"]))
            for n in nodes
            if n.target is torch.ops.zgcompile.dynamic_rows.default
        ]

    @cached_property
    def names(self) -> dict[sympy.Symbol, str]:
        return names_of_sizes(self.program)

    @cached_property
    def open_sizes(self) -> set[sympy.Symbol]:
        """Every size that is neither the length of a batch nor set by the user."""
        mine = {symbol for symbol, name in self.names.items() if self.envelope.override(name) is None}
        return (mine & size_symbols(self.program)) - set(self.lengths)

    @cached_property
    def prefix(self) -> SamplingPrefix:
        """Of the open sizes that batches and draws decide. Those that depend on state that the step writes, or on
        nothing that changes from dry run to dry run, would be sized by how things are now."""
        placeholders = self.program.placeholders
        lifted = placeholders[self.program.first_lifted() :]
        written = {lifted[w.lifted] for w in self.program.state_writes}
        written |= {node for node, entry in zip(lifted, self.program.lifted, strict=True) if entry.kind == "grad"}
        varying = {placeholders[0], *self.program.argument_placeholders}
        inputs = value_inputs(self.program.fx_graph.graph)
        decided = set()
        for node, reads in inputs.items():
            if reads & varying and not reads & written:
                decided |= set(node.meta.get("unbacked_bindings") or {})
        return SamplingPrefix(self.program, self.open_sizes & decided)

    def dry(self, run: DryRun, observed: Observed, full: Sequence[Counts]) -> tuple[Envelope, EnvelopeFit | None]:
        """The envelope from dry runs, or by headroom with the reason. `full`: counts of calls with full batches, which
        must look like the random ones. No capacity is below what a call has needed (`observed`).

        Raises:
            BadInput: what `Envelope(batches=)` gives are not batches of this step.
        """
        if self.envelope.headroom is not None:
            return self.envelope, None
        if not self.open_sizes:
            if self.envelope.caps:
                return self.by_headroom("Envelope(caps=) sets every capacity")
            return self.envelope, EnvelopeFit("fixed", self.envelope.probability, 0.0, 0.0)
        try:
            if not self.prefix.symbols:
                raise CannotCalibrate(STATE_DECIDES)
            if self.envelope.batches is not None:
                return self._fitted(self._sample(run), "given batches", observed.counts)
            fitted, record = self._fitted(self._random(run, full), "random batches", observed.counts)
            if self.envelope.probability is None:
                self._check_near(fitted.rows, full)
            return fitted, record
        except CannotCalibrate as error:
            return self.by_headroom(error.reason)

    def from_calls(self, calls: Sequence[Counts]) -> tuple[Envelope, EnvelopeFit | None]:
        """The envelope from what calls have needed, overflows among them."""
        if self.envelope.headroom is not None:
            return self.envelope, None
        symbols = self.prefix.symbols
        if not symbols:
            return self.by_headroom(STATE_DECIDES)
        sample = [[counts[s] for s in symbols] for counts in calls if all(s in counts for s in symbols)]
        if len(sample) < FEWEST:
            return self.by_headroom(f"only {len(sample)} calls since the last fit, which they have outgrown")
        return self._fitted(np.array(sample, dtype=np.int64), "calls", {})

    def by_headroom(self, reason: str) -> tuple[Envelope, EnvelopeFit]:
        envelope = replace(self.envelope, headroom=DEFAULT_HEADROOM, max_overflow_probability=None)
        return envelope, EnvelopeFit("headroom", self.envelope.probability, reason=reason)

    def _fitted(self, sample: np.ndarray, source: str, floor: Counts) -> tuple[FittedEnvelope, EnvelopeFit]:
        p = self.envelope.probability
        p, fit = (p, fit_joint(sample, p)) if p is not None else cheapest(sample)
        rows = {s: max(n, floor.get(s, 0)) for s, n in zip(self.prefix.symbols, fit.rows, strict=True)}
        rest = "sizes that depend on what the step changes go by headroom" if self._rest() else ""
        record = EnvelopeFit(source, p, fit.estimated, fit.bound, fit.any_law, len(sample), fit.extrapolated, rest)
        return FittedEnvelope(caps=self.envelope.caps, rows=rows), record

    def _rest(self) -> set[sympy.Symbol]:
        return self.open_sizes - set(self.prefix.symbols)

    # -- dry runs

    @cached_property
    def tables(self) -> dict[int, int]:
        """Rows of the smallest table that each argument indexes as it is, by argument."""
        limits, rows = direct_limits(self.program.fx_graph.graph), dict[int, int]()
        for i, placeholder in enumerate(self.program.argument_placeholders):
            found = [limits[node] for node in (placeholder, *placeholder.users) if node in limits]
            if found:
                rows[i] = min(found)
        return rows

    def _random(self, run: DryRun, full: Sequence[Counts]) -> np.ndarray:
        """Counts of random batches, over whole tables where that goes well."""
        wide = replace(run, pool=run.pool.over_tables(self.tables))
        try:
            sample = self._sample(wide)
            self._check_alike(sample, full)
        except CannotCalibrate as error:
            if isinstance(error, TooSlow) or wide.pool == run.pool:
                raise
            sample = self._sample(run)
            self._check_alike(sample, full)
        return sample

    def _sample(self, run: DryRun) -> np.ndarray:
        """Counts [batches, sizes]. Batches double while time allows, so that their number hardly depends on the
        time."""
        most, seconds = DEFAULT if self.envelope.probability is None else ASKED
        make = self.envelope.batches
        host = HostRandom.take() if make is not None else None
        batches = self._drawn(run) if make is None else given_batches(make, self.program.arguments, run.device)
        start, start_wall = time.thread_time(), time.perf_counter()
        counts: list[list[int]] = []
        try:
            with contextlib.closing(batches):
                for arguments in batches:
                    counts.append(self._count(run, arguments, len(counts)))
                    waited = (time.perf_counter() - start_wall) / WAITING
                    n, spent = len(counts), max(time.thread_time() - start, waited)
                    if n < FEWEST and spent > seconds:
                        raise TooSlow(f"{n} dry runs of the sampling took {spent:.1f} s")
                    if n == most or (n >= FEWEST and n & (n - 1) == 0 and 2 * spent > seconds):
                        break
        finally:
            if host is not None:
                host.restore()
        return np.array(counts, dtype=np.int64)

    def _count(self, run: DryRun, arguments: Sequence[torch.Tensor], number: int) -> list[int]:
        lengths: dict[int, int] = {}
        for entry, tensor in zip(self.program.arguments, arguments, strict=True):
            if entry.length is not None:
                lengths[entry.length] = tensor.shape[0]
        integers = [step_key(DRY_SEED, number), *(lengths[i] for i in sorted(lengths))]
        scalars = [torch.tensor(v, dtype=torch.int64, device=run.device) for v in integers]
        try:
            return self.prefix.counts([*scalars, *arguments, *run.launch.hypers, *run.lifted])
        except Exception as error:  # whatever it is, headroom needs no dry run
            first = str(error).strip().split("\n")[0] or type(error).__name__
            raise CannotCalibrate(f"the sampling fails on a dry run: {first}") from error

    def _drawn(self, run: DryRun) -> Generator[list[torch.Tensor], None, None]:
        current = [t.detach() for t in run.launch.arguments]
        wanted: list[tuple[int, int]] = []
        for i, entry in enumerate(self.program.arguments):
            if entry.length is not None:
                rows = run.rows[entry.length]
                refusal = run.pool.refusal(i, current[i], rows) if i in self.prefix.arguments else None
                if refusal:
                    raise CannotCalibrate(f"argument {entry.name} {refusal}: no random batch can be drawn")
                wanted.append((i, rows))
        number = 0
        while True:
            generator = np.random.Generator(np.random.Philox(key=[DRY_SEED, number]))
            arguments = list(current)
            for i, rows in wanted:
                if i in self.prefix.arguments:
                    arguments[i] = run.pool.draw(i, current[i], rows, generator)
                else:
                    arguments[i] = current[i][:1].expand(rows, *current[i].shape[1:])
            yield arguments
            number += 1

    def _check_alike(self, sample: np.ndarray, calls: Sequence[Counts]) -> None:
        """What calls have needed could be what random batches need; by the mean, as a few calls show no more."""
        centre, spread = sample.mean(axis=0), sample.std(axis=0)
        for i, symbol in enumerate(self.prefix.symbols):
            needed = [counts[symbol] for counts in calls if symbol in counts]
            if not needed:
                raise CannotCalibrate("no call with as many rows has been counted, to compare random batches with")
            mean = sum(needed) / len(needed)
            above = FAR * spread[i] / len(needed) ** 0.5 + FAR_SHARE * centre[i] + 1
            below = FAR_BELOW * spread[i] + FAR_SHARE_BELOW * centre[i] + 1
            if not centre[i] - below <= mean <= centre[i] + above:
                raise CannotCalibrate(
                    f"calls have needed {mean:.0f} rows, random batches {centre[i]:.0f} +- {spread[i]:.0f}, "
                    "so ids drawn uniformly are not like the batches; pass Envelope(batches=)"
                )

    def _check_near(self, rows: Counts, calls: Sequence[Counts]) -> None:
        """A few ids with very many neighbours, which calls may never have, give random batches any spread."""
        for symbol, cap in rows.items():
            most = max((counts[symbol] for counts in calls if symbol in counts), default=0)
            if cap > LARGEST_RATIO * most + 2 * ROWS_PER_TILE:
                raise CannotCalibrate(f"random batches may need {cap} rows where calls have needed {most}")


def cheapest(sample: np.ndarray) -> tuple[float, JointFit]:
    """The probability whose capacities cost least, in replays a step: re-runs x their bound, and the share of pads."""
    needed = max(float(sample.mean(axis=0).sum()), 1.0)
    fits = [(p, fit_joint(sample, p, least=ROWS_PER_TILE)) for p in PROBABILITIES]
    return min(fits, key=lambda entry: RERUN * max(entry[0], entry[1].bound) + sum(entry[1].rows) / needed)
