"""The warning for a step that is captured again and again: a Python value under it keeps changing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zgcompile.errors import CaptureWarning
from zgcompile.frontend.arguments import Arguments, argument_name
from zgcompile.frontend.guards import Guards
from zgcompile.frontend.user_warning import warn_user
from zgcompile.ir.source import code_line

MANY_CAPTURES = 8


def warn_of_many_captures(fn: Callable[..., Any], before: Guards, arguments: Arguments) -> None:
    """`before`: the guards of the capture before this one, which did not hold for these arguments."""
    warn_user(
        f"{code_line(fn)}: trace number {MANY_CAPTURES} of this step, since {_changed(fn, before, arguments)} has "
        "another value again, and no call with a new value is a replay\n"
        "  instead: pass what the step decides by (a flag such as i % 4 == 3) and not a running number; of an object, "
        "its tensors (data.x, data.edge_index.t())",
        CaptureWarning,
    )


def _changed(fn: Callable[..., Any], before: Guards, arguments: Arguments) -> str:
    positions = [i for i, leaf in enumerate(arguments.leaves) if not isinstance(leaf, torch.Tensor)]
    for position, now, then in zip(positions, arguments.guard_key()[-1], before.key[-1], strict=False):
        if now != then:
            return f"its argument {argument_name(fn, position)}"
    change = before.snapshot.check()
    return change.path if change is not None else "a hyperparameter"
