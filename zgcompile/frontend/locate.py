"""The user's line at which something became true, found by running the code again under a line tracer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from zgcompile.errors import SourceLine
from zgcompile.ir.source import is_user_file, source_line


def line_of_change(run: Callable[[], Any], appeared: Callable[[], bool]) -> SourceLine | None:
    """Run `run()`, asking `appeared()` after each user line; the line that was being run when it first said yes, or
    None.

    `run` may raise: what happened up to then counts.
    """
    watch = _Watch(appeared)
    before = sys.gettrace()
    sys.settrace(watch.enter)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(before)
    return watch.found


class _Watch:
    def __init__(self, appeared: Callable[[], bool]) -> None:
        self.appeared = appeared
        self.running: SourceLine | None = None
        self.found: SourceLine | None = None

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call: only user frames are followed. What the caller's line did before the call is the caller's."""
        del event, arg
        if self.found is not None or not is_user_file(frame.f_code.co_filename):
            return None
        self.look()
        return self.follow

    def follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if self.found is not None:
            return None
        if event == "line":
            self.look()
            self.running = _line(frame)
        elif event == "return":
            self.look()
            caller = frame.f_back
            while caller is not None and not is_user_file(caller.f_code.co_filename):
                caller = caller.f_back
            self.running = None if caller is None else _line(caller)
        return self.follow

    def look(self) -> None:
        if self.found is None and self.running is not None and self.appeared():
            self.found = self.running


def _line(frame: FrameType) -> SourceLine:
    return source_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
