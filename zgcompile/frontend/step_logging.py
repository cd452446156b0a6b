"""What a step logs while it is traced: numbers that only the device knows have no text, and replays log nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from zgcompile.errors import CaptureWarning, SourceLine
from zgcompile.frontend.user_warning import warn_user
from zgcompile.ir.source import current_user_line

LIBRARY = "torch"  # its own records are none of the user's
DETAIL = "torch._subclasses.fake_tensor"  # logs what it then raises

_handle = logging.Logger.handle
_traced = threading.local()  # `lines`: of the records made in this thread's trace, where it is in one
_traces = 0
_lock = threading.Lock()


def _note(logger: logging.Logger, record: logging.LogRecord) -> None:
    lines: list[SourceLine | None] | None = getattr(_traced, "lines", None)
    if lines is None or (record.name.partition(".")[0] == LIBRARY and record.name != DETAIL):
        _handle(logger, record)
    elif record.name != DETAIL:
        lines.append(current_user_line())


def _count(change: int) -> None:
    """Traces may overlap: the first one in puts the patch there, the last one out takes it away."""
    global _traces
    with _lock:
        _traces += change
        logging.Logger.handle = _note if _traces else _handle  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def silent_logging() -> Iterator[None]:
    """Records of this thread go nowhere; a warning names the first of the user's lines that made one, at the end of a
    trace that succeeds."""
    outer, _traced.lines = getattr(_traced, "lines", None), []
    _count(1)
    try:
        yield
    finally:
        lines, _traced.lines = _traced.lines, outer
        _count(-1)
    if lines:
        warn_user(
            f"{lines[0]}: the step logs, which a replay does not, as it runs no Python\n"
            "  instead: return what is to be logged, and log it after the call",
            CaptureWarning,
        )
