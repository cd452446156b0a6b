"""Everything zgcompile raises on purpose. A message says what happened, where (the user's file:line), and what to write
instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code: `file`, 1-based `line`, the name of the enclosing `function` and the stripped
    `text`."""

    file: str
    line: int
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class ZgError(Exception):
    """Base of every zgcompile error: `what` happened, `where` in the user's code (None when unknown), `advice` on what
    to do."""

    def __init__(self, what: str, *, where: SourceLine | None = None, advice: str = "") -> None:
        self.what, self.where, self.advice = what, where, advice
        lines = [what if where is None else f"{where}: {what}"]
        if where is not None and where.text:
            lines.append(f"    {where.text}")
        if advice:
            lines.append(f"  instead: {advice}")
        self.message = "\n".join(lines)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message  # not `args`: torch.fx appends its own account of the node to those


class CaptureRefused(ZgError):
    """The step does something that one FX graph cannot hold, e.g. Python control flow on a device value."""


class UnsupportedOp(ZgError):
    """An op with a dynamic dimension has no padding-safe rule."""


class PythonStateChanged(CaptureRefused):
    """The step changes Python state (a counter, a list), which a replay would silently freeze."""


class BadInput(ZgError):
    """An argument of the compiled step has the wrong device, dtype, rank or length."""


class StepError(ZgError):
    """The batch itself is wrong where eager would raise too, e.g. an index out of range. No state was changed."""

    @classmethod
    def of_batch(cls, what: str, where: SourceLine | None) -> StepError:
        """The error for a batch that cannot be run."""
        return cls(f"{what}; nothing was changed", where=where, advice="check the batch that was passed in")


class InternalError(ZgError):
    """An invariant of zgcompile broke: a bug of ours, not of the user's code."""


class VerificationFailed(ZgError):
    """`verify` found a difference between the compiled step and the eager function; `report` (a `Report`) has every
    entry."""

    report: Any = None


class CaptureWarning(UserWarning):
    """A CUDA Graph could not be captured; the step goes on without one."""
