"""`model.train()` and `model.eval()` inside a step: the one change of Python state that a replay makes as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zgcompile.frontend.python_state import Change


@dataclass(frozen=True)
class TrainingFlag:
    """`module.training` as the step finds it, which is guarded, and as it leaves it."""

    module: torch.nn.Module
    before: bool
    after: bool


def is_training_flag(change: Change) -> bool:
    """The change is that of `training` of a module, from one bool to the other."""
    return (
        isinstance(change.owner, torch.nn.Module)
        and change.key == "training"
        and change.kind == "value changed"
        and type(change.owner.training) is bool
    )


def training_flags(changes: Iterable[Change]) -> list[TrainingFlag]:
    """The flags among the changes, while they are as the step left them."""
    modules = [c.owner for c in changes if is_training_flag(c)]
    return [TrainingFlag(m, not m.training, m.training) for m in modules if isinstance(m, torch.nn.Module)]


def leave(flags: Iterable[TrainingFlag]) -> None:
    """As the step leaves them; past `Module.__setattr__`, which looks for tensors first."""
    for flag in flags:
        flag.module.__dict__["training"] = flag.after


def find(flags: Iterable[TrainingFlag]) -> None:
    """As the step finds them."""
    for flag in flags:
        flag.module.__dict__["training"] = flag.before
