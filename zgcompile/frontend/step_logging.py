"""What a step logs while it is traced: numbers that only the device knows have no text, and replays log nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

from zgcompile.errors import CaptureWarning, SourceLine
from zgcompile.ir.source import current_user_line

LIBRARY = "torch"  # its own records are none of the user's
DETAIL = "torch._subclasses.fake_tensor"  # logs what it then raises


@contextlib.contextmanager
def silent_logging() -> Iterator[None]:
    """Records of this thread go nowhere; a warning names the first of the user's lines that made one, at the end of a
    trace that succeeds."""
    thread, handle = threading.get_ident(), logging.Logger.handle
    met: list[SourceLine | None] = []

    def note(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread or (record.name.startswith(LIBRARY) and record.name != DETAIL):
            handle(logger, record)
        elif record.name != DETAIL:
            met.append(current_user_line())

    logging.Logger.handle = note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]
    if met:
        warnings.warn(
            f"{met[0]}: the step logs, which a replay does not, as it runs no Python\n"
            "  instead: return what is to be logged, and log it after the call",
            CaptureWarning,
            stacklevel=2,
        )
