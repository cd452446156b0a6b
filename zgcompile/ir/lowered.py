"""A lowered step: the static FX graph, the layout of its metadata buffer, and what its inputs and outputs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from zgcompile.ir.status import MetadataLayout


@dataclass(frozen=True)
class TensorOutput:
    """A returned tensor: number `position` of the returned tensors, cut to `sizes` (int or expressions in size
    symbols)."""

    position: int
    sizes: tuple[int | sympy.Expr, ...]


@dataclass(frozen=True)
class SizeOutput:
    """A returned SymInt: an exact count, known when the call returns."""

    expr: sympy.Expr


@dataclass(frozen=True)
class NumberOutput:
    """A returned `float(x)` or `x.item()`: a 0-d tensor, read when the user reads the number."""

    position: int
    is_int: bool


@dataclass(frozen=True)
class ConstantOutput:
    """A returned plain Python value."""

    value: Any


Output = TensorOutput | SizeOutput | NumberOutput | ConstantOutput


@dataclass
class LoweredStep:
    """Placeholders, in order: the launch block (launch id, record address); the key; the lengths; the argument buffers
    at cap; one float64 vector of hyperparameters; the lifted tensors; the gradient buffers. Outputs, in order: the
    metadata buffer, what `zgcompile::publish` returns, the returned tensors at cap. State and gradient buffers are
    written in place by `copy_`, gated by the status.
    """

    fx_graph: GraphModule
    layout: MetadataLayout
    caps: dict[sympy.Symbol, int]
    names: dict[sympy.Symbol, str]
    outputs: list[Output]
    lengths: int
    argument_caps: list[
        int | None
    ]  # rows of each argument buffer; None for a 0-d one, 0 for one that the step never reads
    hypers: int
    gradients: int
    example_inputs: list[torch.Tensor]  # fake, in the order above

    @property
    def argument_inputs(self) -> list[torch.Tensor]:
        first = 2 + self.lengths
        return self.example_inputs[first : first + len(self.argument_caps)]

    @property
    def gradient_inputs(self) -> list[torch.Tensor]:
        return self.example_inputs[len(self.example_inputs) - self.gradients :]

    def written_lifted(self) -> list[int]:
        """Indices of the lifted tensors that the step writes in place."""
        placeholders = [n for n in self.fx_graph.graph.nodes if n.op == "placeholder"]
        first = 2 + self.lengths + len(self.argument_caps) + 1
        written = {n.args[0] for n in self.fx_graph.graph.nodes if n.target is torch.ops.aten.copy_.default}
        lifted = placeholders[first : len(placeholders) - self.gradients]
        return [i for i, placeholder in enumerate(lifted) if placeholder in written]
