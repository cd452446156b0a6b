"""Inputs of a small function, and its `StepProgram` as the frontend makes it for a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten
from zgcompile.passes.canonicalise import Canonicalise

from zgcompile.frontend.functionalise import functionalise
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.frontend.trace import Traced, _record_user_lines
from zgcompile.ir.draws import KeyedDraws
from zgcompile.ir.program import ArgumentInput, LiftedInput, StepProgram

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rows:
    """A dynamic input [group, *shape]. Integers lie in [low, high), `high` perhaps the count of a group."""

    group: str = "n"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    low: int = -3
    high: int | str = 4


@dataclass(frozen=True)
class Fixed:
    """A static input, lifted. `proven`: its value range is known, as of a table that no step writes."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    low: int = -3
    high: int = 4
    proven: bool = False


@dataclass(frozen=True)
class Hyper:
    """A Python float that may change from call to call."""

    value: float = 0.3


Input = Rows | Fixed | Hyper


def trace(fn: Callable[..., Any], inputs: Sequence[Input]) -> StepProgram:
    """The canonical `StepProgram` of `fn`, as the frontend makes it for a step of these inputs."""
    shape_env = EnvelopeShapeEnv()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    rows = [i for i in inputs if isinstance(i, Rows)]
    groups = list(dict.fromkeys(i.group for i in rows))
    with fake_mode:
        key = torch.zeros((), dtype=torch.int64)
        lengths = [torch.zeros((), dtype=torch.int64) for _ in groups]
        buffers = [torch.empty((48 + len(i.group), *i.shape), dtype=i.dtype) for i in rows]
        fixed = [torch.empty(i.shape, dtype=i.dtype) for i in inputs if isinstance(i, Fixed)]
    hypers = [
        shape_env.hyperparameter(f"hyper{k}", i.value) for k, i in enumerate(i for i in inputs if isinstance(i, Hyper))
    ]
    found: dict[str, Any] = {}

    def step(key: Any, lengths: Any, buffers: Any, hypers: Any, fixed: Any) -> Any:
        _record_user_lines()
        first: dict[str, Any] = {}
        given: dict[type, Iterator[Any]] = {Hyper: iter(hypers), Fixed: iter(fixed), Rows: iter(buffers)}
        values = []
        for kind in inputs:
            value = next(given[type(kind)])
            if isinstance(kind, Rows):
                if kind.group in first:
                    value = torch.ops.zgcompile.dynamic_rows_like(value, first[kind.group])
                else:
                    value = first[kind.group] = torch.ops.zgcompile.dynamic_rows(
                        value, lengths[groups.index(kind.group)]
                    )
            values.append(value)
        with KeyedDraws(key):
            leaves, found["spec"] = tree_flatten(fn(*values))
        found["constants"] = {
            k: v for k, v in enumerate(leaves) if not isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat))
        }
        return [
            None if k in found["constants"] else v.detach() if isinstance(v, torch.Tensor) else v
            for k, v in enumerate(leaves)
        ]

    with fake_mode, enable_python_dispatcher():
        fx_graph = make_fx(step, tracing_mode="real", record_stack_traces=True)(key, lengths, buffers, hypers, fixed)
    lifted = [LiftedInput(f"fixed{k}", lambda: None, "tensor") for k in range(len(fixed))]  # type: ignore[arg-type, return-value]
    traced = Traced(
        fx_graph, shape_env, fake_mode, [key, *lengths, *buffers, *hypers, *fixed], lifted,
        [_Site(k) for k in range(len(hypers))], found["spec"], found["spec"].num_leaves, found["constants"], [],
    )  # fmt: skip
    arguments = [ArgumentInput(f"rows{k}", k, groups.index(i.group), i.dtype, CPU, i.shape) for k, i in enumerate(rows)]
    program = functionalise(traced, arguments, len(groups))
    Canonicalise().apply(program)
    return program


@dataclass(frozen=True)
class _Site:
    path: int


def argument_symbols(program: StepProgram, inputs: Sequence[Input]) -> dict[str, sympy.Symbol]:
    """The size symbol of each group of which an argument is used."""
    groups = list(dict.fromkeys(i.group for i in inputs if isinstance(i, Rows)))
    placeholders = program.placeholders
    born = {
        n.args[1]: next(iter(n.meta["unbacked_bindings"]))
        for n in program.fx_graph.graph.nodes
        if "dynamic_rows.default" in str(n.target)
    }
    return {group: born[placeholders[1 + k]] for k, group in enumerate(groups) if placeholders[1 + k] in born}
