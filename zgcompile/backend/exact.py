"""Runs the dynamic FX graph at exact sizes: warm-up steps, overflow re-runs, and the measuring of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Interpreter, Node
from torch.utils._pytree import key_get

from zgcompile.backend.checked_indices import checked
from zgcompile.ir.demands import LINALG_ERRORS, is_demand, message_of
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import evaluate

UNIQUE = (torch.ops.aten._unique2.default,)


class ConditionFailed(Exception):
    """The dynamic FX graph is not the user's step for this batch: a comparison that the trace decided came out
    otherwise, or something that eager demands of values does not hold."""


@dataclass
class ExactRun:
    """`outputs` as the program lists them; the count of each size symbol; least and largest id of each `unique`."""

    outputs: list[Any]
    counts: dict[sympy.Symbol, int] = field(default_factory=dict)
    ids: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Exact(Interpreter):
    def __init__(self, program: StepProgram) -> None:
        super().__init__(program.fx_graph)
        self.program = program
        self.counts: dict[sympy.Symbol, int] = {}
        self.ids: dict[str, tuple[int, int]] = {}

    def count(self, symbol: sympy.Symbol) -> int:
        """The value of a symbol; of the one that it was merged into where its own op is gone."""
        known = self.counts.get(symbol)
        return self.counts[self.program.shape_env.replace(symbol)] if known is None else known

    def run_node(self, n: Node) -> Any:
        if is_demand(n):
            return self.ask(n)
        if n.target in UNIQUE:
            ids = self.env[n.args[0]]  # type: ignore[index]
            if ids.numel() and not ids.dtype.is_floating_point and ids.dtype != torch.bool:
                low, high = torch.aminmax(ids)
                self.ids[n.name] = (int(low), int(high))
        result = super().run_node(n)
        for symbol, path in (n.meta.get("unbacked_bindings") or {}).items():
            value = key_get(result, path) if path else result
            if isinstance(value, (int, float)) and symbol.is_integer:
                self.counts[symbol] = int(value)
        return result

    def ask(self, node: Node) -> None:
        """On the host: a kernel's assertion would end the process's use of the device."""
        value: torch.Tensor = self.env[node.args[0]]  # type: ignore[index]
        if node.target is LINALG_ERRORS:
            if bool(value.any()):
                raise ConditionFailed(f"{node.args[1]} fails")
        elif not bool(value):
            raise ConditionFailed(message_of(node))


def run_exact(program: StepProgram, inputs: Sequence[Any]) -> ExactRun:
    """Run once, writing nothing: the caller stores the new state when all is well.

    Raises:
        ConditionFailed, or what an op raises: the trace does not hold for this batch; nothing was written.
    """
    interpreter = _Exact(program)
    with torch.no_grad(), checked(inputs[0].device):
        outputs = interpreter.run(*inputs, enable_io_processing=False)
    for condition in program.conditions:
        if bool(evaluate(condition.expr, interpreter.count, {})) != condition.value:
            raise ConditionFailed(str(condition.expr))
    return ExactRun(list(outputs), interpreter.counts, interpreter.ids)
