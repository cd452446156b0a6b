"""Which values are made with zero pads: those whose pads some op would have to clean later.

A value that the forward pass reads as it is and the backward pass reads cleaned (a matrix product that contracts its
rows: each weight gradient) would be held twice. Pads may hold anything, so zeros serve every reader, and one buffer is
enough.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from zgcompile.passes.rules.interpreter import Lowering, Place
from zgcompile.passes.rules.static_inputs import split_inputs, static_inputs

from zgcompile.ir.bounds import Bounds
from zgcompile.ir.program import StepProgram

aten = torch.ops.aten
# Their rules hand the pads on, so the value behind them can be the clean one.
ONLY_MOVES = {aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default}


def clean_pads(program: StepProgram, bounds: Bounds, device: torch.device) -> frozenset[Place]:
    """The places, by one run of the rules on fake tensors."""
    lowering = Lowering(program, bounds, device)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        arguments, lifted, _ = split_inputs(static_inputs(program, bounds, device)[1:], program)
        lowering.run_flat([*arguments, *lifted])
    places = {id(value): (node, position) for value, node, position in lowering.born}
    wanted = [places[id(value)] for value in lowering.context.cleaned if id(value) in places]
    return frozenset((_source(node).name, position) for node, position in wanted)


def _source(node: Node) -> Node:
    while node.target in ONLY_MOVES:
        node = node.args[0]  # type: ignore[assignment]
    return node
