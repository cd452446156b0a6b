"""What must hold for a capture to serve a call: checked on the host before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from zgcompile.frontend.arguments import Arguments
from zgcompile.frontend.capture import Captured
from zgcompile.frontend.python_state import PythonSnapshot
from zgcompile.ir.program import StepProgram


class Guards:
    """The guards of one capture. `refresh` re-reads the Python state after a step that was the user's own function."""

    def __init__(self, fn: Any, captured: Captured, arguments: Arguments) -> None:
        self.fn, self.captured = fn, captured
        self.key = arguments.guard_key()
        self.tensors = list(arguments.tensors)
        self.groups = captured.groups
        self.numbers: tuple[float, ...] | None = None
        self.refresh()

    def refresh(self) -> None:
        self.snapshot = PythonSnapshot.take(self.fn, self.captured.roots)
        lifted = {id(t) for t in self.captured.found.tensors}
        self.sites = [s for s in self.snapshot.tensors if id(s.tensor) in lifted]
        self.versions = {i: t._version for i, t in self.tables()}

    def tables(self) -> list[tuple[int, torch.Tensor]]:
        """Integer lifted inputs that the step never writes: their value ranges are proven from their data."""
        written = {w.lifted for w in self.captured.program.state_writes}
        found = []
        for i, entry in enumerate(self.captured.program.lifted):
            if entry.kind == "tensor" and i not in written:
                tensor = entry.resolve()
                if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool:
                    found.append((i, tensor))
        return found

    def hold(self, arguments: Arguments, hypers: tuple[float, ...]) -> bool:
        return (
            arguments.guard_key() == self.key
            and len(arguments.tensors) == len(self.tensors)
            and self.lengths_agree(arguments)
            and self.snapshot.check() is None
            and all(site.get() is site.tensor for site in self.sites)
            and self.hypers_hold(hypers)
        )

    def lengths_agree(self, arguments: Arguments) -> bool:
        """Arguments that share a size symbol have the same length now."""
        if len(self.groups) == 1:
            return True
        seen: dict[int, int] = {}
        for group, length in zip(self.groups, arguments.lengths(), strict=True):
            if group is not None and length is not None and seen.setdefault(group, length) != length:
                return False
        return True

    def hypers_hold(self, hypers: tuple[float, ...]) -> bool:
        """Comparisons on hyperparameters (`weight_decay != 0`) come out as traced; looked at again only when one changed."""
        if hypers != self.numbers:
            if not hyper_guards_hold(self.captured.program, hypers):
                return False
            self.numbers = hypers
        return True


def hyper_guards_hold(program: StepProgram, hypers: Sequence[float]) -> bool:
    values = {symbol: sympy.Float(value) for symbol, value in zip(program.hyper_symbols, hypers, strict=True)}
    return all(bool(expr.subs(values)) for expr, _ in program.hyper_guards)
