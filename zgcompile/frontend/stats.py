"""What a compiled step tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from zgcompile.ir.envelope import EnvelopeFit


@dataclass(frozen=True)
class CapacityUse:
    """One dynamic dimension: where it is born, the largest count a replay has used, and the rows held for it."""

    name: str
    used: int
    held: int


@dataclass(frozen=True)
class Stats:
    """A snapshot.

    Every call is one of: `replays`, or `eager_runs` (warm-up, overflow and precondition re-runs: at exact sizes,
    waiting on the host). `overflows` counts batches that outgrew a capacity, `preconditions` those that the user's own
    function ran because a comparison came out otherwise than traced, because eager raises there, or because an argument
    shares memory with what the step writes. `host_reads` are the status reads of the replays; `deferred_reads` the
    returned numbers that the user read. `envelope` maps each dynamic dimension to the rows used and held;
    `envelope_fit` says how well they are known, None before the first fit and with `Envelope(headroom=)`. `memory`:
    bytes of the static buffers that this step holds, an estimate of its capture's own memory on top of the user's
    tensors.
    """

    calls: int = 0
    replays: int = 0
    eager_runs: int = 0
    overflows: int = 0
    preconditions: int = 0
    captures: int = 0
    traces: int = 0
    host_reads: int = 0
    deferred_reads: int = 0
    memory: int = 0
    envelope: dict[str, CapacityUse] = field(default_factory=dict)
    envelope_fit: EnvelopeFit | None = None


@dataclass
class Counters:
    """The running numbers behind `Stats`."""

    calls: int = 0
    replays: int = 0
    eager_runs: int = 0
    overflows: int = 0
    preconditions: int = 0
    captures: int = 0
    traces: int = 0
    host_reads: int = 0
    deferred_reads: int = 0

    def read_deferred(self) -> None:
        self.deferred_reads += 1
