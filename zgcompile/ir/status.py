"""The status of a step: device checks, in the order in which they are laid out at the head of the metadata buffer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from zgcompile.errors import SourceLine


class Failure(enum.Enum):
    """Why a step failed."""

    USER_ERROR = "user error"  # eager would raise, and the step may handle it: run the user's own function
    PRECONDITION = "precondition"  # the trace decided a comparison otherwise: run the user's own function
    CAPACITY = "capacity"  # a count is above its cap: run the batch at exact sizes


@dataclass(frozen=True)
class Check:
    """One device check: slot `k` of the metadata buffer is nonzero when check `k` failed."""

    failure: Failure
    what: str
    where: SourceLine | None


def decisive(failed: Sequence[Check]) -> Check:
    """Which of the failed checks, given in program order, says what happened.

    A check can only be spoilt by what lies in front of it. So an overflow that comes first explains all that follows;
    behind a failed precondition the step is not the user's; what is left is the user's first error.
    """
    if failed[0].failure is Failure.CAPACITY:
        return failed[0]
    return next((check for check in failed if check.failure is Failure.PRECONDITION), failed[0])


@dataclass(frozen=True)
class CountSlot:
    """One count of the metadata buffer, behind the checks: the true (unclamped) value of a size symbol."""

    symbol: sympy.Symbol
    cap: int | None
    name: str


@dataclass(frozen=True)
class MetadataLayout:
    """int64 metadata buffer: one slot a check, then one slot a count."""

    checks: tuple[Check, ...]
    counts: tuple[CountSlot, ...]

    @property
    def size(self) -> int:
        return len(self.checks) + len(self.counts)

    def failed(self, metadata: list[int]) -> list[Check]:
        return [check for check, value in zip(self.checks, metadata, strict=False) if value]

    def count_values(self, metadata: list[int]) -> dict[sympy.Symbol, int]:
        return {slot.symbol: metadata[len(self.checks) + i] for i, slot in enumerate(self.counts)}
