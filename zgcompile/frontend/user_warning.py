"""Warnings that are shown at the user's line."""

from __future__ import annotations

import sys
import warnings

from zgcompile.ir.source import is_user_file


def warn_user(text: str, category: type[Warning]) -> None:
    """`warnings.warn` at the innermost line of the user's that has led here: the call of the step."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
