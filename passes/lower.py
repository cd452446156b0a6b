"""Makes the dynamic FX graph static: an interpreter over bounded tensors, one rule an op, re-traced into a new FX
graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import preserve_node_meta
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.interpreter import Lowering, Place, Poison
from zgcompile.passes.rules.static_inputs import argument_caps, split_inputs, static_inputs

from zgcompile.errors import UnsupportedOp
from zgcompile.ir.bounded import Bounded, Number, Size
from zgcompile.ir.bounds import Bounds
from zgcompile.ir.lowered import ConstantOutput, LoweredStep, NumberOutput, Output, SizeOutput, TensorOutput
from zgcompile.ir.program import StepProgram
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.status import Check, CountSlot, MetadataLayout

aten = torch.ops.aten


def lower(
    program: StepProgram,
    bounds: Bounds,
    device: torch.device,
    poison: Poison | None = None,
    clean: Collection[Place] = (),
) -> LoweredStep:
    """The static FX graph of a step at the given capacities; `clean` as `passes/clean_pads.py` says.

    Raises:
        UnsupportedOp: an op has no rule on a dynamic dimension; the message names the user's line.
    """
    lowering = Lowering(program, bounds, device, poison, clean)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    gradients = [w for w in program.gradient_writes if w.output is not None]
    outputs: list[Output] = []
    layout: list[MetadataLayout] = []
    with fake_mode:
        inputs = static_inputs(program, bounds, device)

    def static_step(launch: torch.Tensor, *flat: torch.Tensor) -> list[torch.Tensor]:
        _keep_stack_traces()
        arguments, lifted, buffers = split_inputs(flat, program)
        results, checks = lowering.run_flat([*arguments, *lifted])
        metadata, found = _metadata(lowering.context, checks, bounds)
        # Here the status of several ranks can be combined: the record and every gate below are made of `metadata`.
        published = torch.ops.zgcompile.publish(metadata, launch, len(checks))
        good = published[1] != 0
        layout.append(found)
        returned, described = _returned(program, results, lowering.context)
        outputs.extend(described)
        for write in program.state_writes:
            _write_gated(good, lifted[write.lifted], lowering.context.raw(results[write.output]))
        for buffer, gradient in zip(buffers, gradients, strict=True):
            _write_gated(good, buffer, lowering.context.raw(results[gradient.output]))  # type: ignore[index]
        return [metadata, published, *returned]

    with fake_mode, torch.no_grad(), preserve_node_meta():
        fx_graph = make_fx(static_step, tracing_mode="real")(*inputs)
    fx_graph.graph.eliminate_dead_code()
    fx_graph.recompile()
    return LoweredStep(
        fx_graph=fx_graph,
        layout=layout[0],
        caps=dict(bounds.caps),
        names=dict(bounds.names),
        outputs=outputs,
        lengths=program.lengths,
        argument_caps=argument_caps(program, bounds),
        hypers=len(program.hyperparameters),
        gradients=len(gradients),
        example_inputs=inputs,
    )


def _metadata(
    context: Context, checks: list[tuple[Check, torch.Tensor]], bounds: Bounds
) -> tuple[torch.Tensor, MetadataLayout]:
    """One int64 vector: the checks, then the true counts."""
    flags = [flag.to(torch.int64).reshape(()) for _, flag in checks]
    counts = [(s, c) for s, c in context.true_counts.items()]
    slots = tuple(CountSlot(s, bounds.caps.get(s), bounds.names.get(s, str(s))) for s, _ in counts)
    values = [*flags, *[c.to(torch.int64).reshape(()) for _, c in counts]]
    if values:
        metadata = torch.ops.zgcompile.stack_scalars(values)
    else:
        metadata = torch.zeros(0, dtype=torch.int64, device=context.device)
    return metadata, MetadataLayout(tuple(check for check, _ in checks), slots)


def _returned(program: StepProgram, results: list[Any], context: Context) -> tuple[list[torch.Tensor], list[Output]]:
    tensors: list[torch.Tensor] = []
    described: list[Output] = []

    def position(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    for node, result in zip(program.outputs[: program.user_outputs], results, strict=False):
        if not isinstance(node, Node):
            described.append(ConstantOutput(node))
        elif isinstance(result, Bounded):
            described.append(TensorOutput(position(result.data), result.sizes))
        elif isinstance(result, torch.Tensor):
            described.append(
                TensorOutput(position(result.clone() if node.op == "placeholder" else result), tuple(result.shape))
            )
        elif isinstance(result, Number):
            described.append(NumberOutput(position(result.value), False))
        elif isinstance(result, Size):
            if node.target is aten._local_scalar_dense.default and result.expr not in context.caps:
                described.append(NumberOutput(position(context.count_tensor(result)), True))
            else:
                if not all(s.is_integer for s in result.expr.free_symbols):
                    raise _int_of_float(node)
                context.count(result)  # a size that cannot be evaluated is refused now, not at a replay
                described.append(SizeOutput(result.expr))
        else:
            described.append(ConstantOutput(result))
    return tensors, described


def _int_of_float(node: Node) -> UnsupportedOp:
    return UnsupportedOp(
        "a whole number made from a float of the device",
        where=user_line_from_stack_trace(node.meta.get("stack_trace") or ""),
        advice="keep it a tensor: (x * 10).long()",
    )


def _write_gated(good: torch.Tensor, target: torch.Tensor, new: torch.Tensor) -> None:
    """`target` becomes `new` only when the whole step is good: the one place where a step writes state."""
    target.copy_(torch.where(good, new.to(target.dtype), target))


def _keep_stack_traces() -> None:
    mode = get_proxy_mode()
    if mode is not None:
        mode.tracer.record_stack_traces = False


def symbols_of(program: StepProgram) -> list[sympy.Symbol]:
    """The size symbols in the order in which they are born."""
    nodes = program.fx_graph.graph.nodes
    return [s for n in nodes if n.op == "call_function" for s in (n.meta.get("unbacked_bindings") or {})]
