"""The inputs of the static step, as the rules take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Number, as_size
from zgcompile.ir.bounds import Bounds
from zgcompile.ir.program import StepProgram
from zgcompile.ir.sizes import upper_bound


def static_inputs(program: StepProgram, bounds: Bounds, device: torch.device) -> list[torch.Tensor]:
    """Empty inputs of the static step: launch block, key, lengths, arguments at cap, hyperparameters, lifted tensors,
    gradient buffers."""
    placeholders = program.placeholders
    first_lifted = program.first_lifted()
    scalar = torch.empty((), dtype=torch.int64, device=device)
    inputs = [torch.empty(2, dtype=torch.int64, device=device)]
    inputs += [scalar, *[scalar.clone() for _ in range(program.lengths)]]
    caps = argument_caps(program, bounds)
    inputs += [_argument_buffer(p, c, device) for p, c in zip(program.argument_placeholders, caps, strict=True)]
    inputs.append(torch.empty(len(program.hyperparameters), dtype=torch.float64, device=device))
    inputs += [_like(p.meta["val"]) for p in placeholders[first_lifted:]]
    graded = [w for w in program.gradient_writes if w.output is not None]
    return inputs + [_like(placeholders[first_lifted + w.lifted].meta["val"]) for w in graded]


def argument_caps(program: StepProgram, bounds: Bounds) -> list[int | None]:
    """Rows of each argument's buffer: the capacity of its length; 0 where the step never looks at it."""
    placeholders = program.placeholders
    lengths = placeholders[1 : 1 + program.lengths]
    caps: dict[int, int] = {}
    for node in program.fx_graph.graph.nodes:
        if node.target is torch.ops.zgcompile.dynamic_rows.default and node.args[1] in lengths:
            size = program.shape_env.replace(as_size(node.meta["val"].shape[0]))
            caps[lengths.index(node.args[1])] = upper_bound(size, bounds.caps)
    return [None if a.length is None else caps.get(a.length, 0) for a in program.arguments]


def _argument_buffer(placeholder: Node, cap: int | None, device: torch.device) -> torch.Tensor:
    like = placeholder.meta["val"]
    shape = tuple(like.shape) if cap is None else (cap, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, device=like.device if like.device.type != "cpu" else device)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)


def split_inputs(
    flat: Sequence[torch.Tensor], program: StepProgram
) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """What follows the launch block: (key, lengths, arguments and hyperparameters), lifted tensors, gradient
    buffers."""
    first = 1 + program.lengths + len(program.arguments)
    hyper, rest = flat[first], list(flat[first + 1 :])
    numbers = [Number(hyper[i]) for i in range(len(program.hyperparameters))]
    return [*flat[:first], *numbers], rest[: len(program.lifted)], rest[len(program.lifted) :]
