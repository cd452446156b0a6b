"""A captured step: the dynamic FX graph of the whole step and what its inputs and outputs mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec

from zgcompile.errors import SourceLine


@dataclass(frozen=True)
class ArgumentInput:
    """A tensor argument of the step; its dimension 0 is `length` (an index into the lengths), None for a 0-d tensor."""

    name: str
    position: int
    length: int | None
    dtype: torch.dtype
    device: torch.device
    trailing: tuple[int, ...]


@dataclass(frozen=True)
class LiftedInput:
    """An outside tensor (parameter, buffer, optimizer state, gradient, table), found anew at each use through
    `resolve`."""

    name: str
    resolve: Callable[[], torch.Tensor]
    kind: str  # "tensor", "state" (optimizer) or "grad"


@dataclass(frozen=True)
class StateWrite:
    """Output `output` of the FX graph is the new value of lifted input `lifted`, written only when the step is good."""

    lifted: int
    output: int


@dataclass(frozen=True)
class GradientWrite:
    """What `.grad` of the parameter `lifted` is after the step: output `output`, or None."""

    lifted: int
    output: int | None


@dataclass(frozen=True)
class Condition:
    """A comparison on sizes that the trace took as `value`, in symbols of the dynamic FX graph."""

    expr: sympy.Basic
    value: bool
    where: SourceLine | None


@dataclass(frozen=True)
class RoundTrip:
    """A host read of a device value in the user's step, and what stands for it in the compiled one."""

    where: SourceLine | None
    op: str
    symbol: str
    replaced_by: str
    count: int = 1


@dataclass
class StepProgram:
    """The functional, dynamic FX graph of a step.

    Placeholders, in order: the key (0-d int64); one 0-d int64 length for each group of arguments that share dimension
    0; the tensor arguments; the hyperparameters (floats); the lifted tensors. Outputs, in order: the leaves of what the
    user's function returned (`user_outputs` of them), then the new gradients and the new state.
    """

    fx_graph: GraphModule
    shape_env: ShapeEnv
    lengths: int
    arguments: list[ArgumentInput]
    hyperparameters: list[str]
    lifted: list[LiftedInput]
    user_outputs: int
    out_spec: TreeSpec
    state_writes: list[StateWrite]
    gradient_writes: list[GradientWrite]
    conditions: list[Condition]
    equalities: list[tuple[sympy.Symbol, sympy.Symbol]]
    hyper_guards: list[tuple[sympy.Basic, SourceLine | None]] = field(default_factory=list)
    hyper_symbols: list[sympy.Symbol] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)

    @property
    def placeholders(self) -> list[Node]:
        return [n for n in self.fx_graph.graph.nodes if n.op == "placeholder"]

    @property
    def argument_placeholders(self) -> list[Node]:
        """One for each of `arguments`."""
        first = 1 + self.lengths
        return self.placeholders[first : first + len(self.arguments)]

    @property
    def outputs(self) -> list[Any]:
        """Nodes or constants, in the order given above."""
        (output,) = (n for n in self.fx_graph.graph.nodes if n.op == "output")
        return list(output.args[0])

    def first_lifted(self) -> int:
        """Position of lifted input 0 among the placeholders."""
        return 1 + self.lengths + len(self.arguments) + len(self.hyperparameters)
