"""Stage two of a capture: the functional form of the traced step, its state writes listed apart (design 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from zgcompile.errors import CaptureRefused, SourceLine
from zgcompile.frontend.trace import Traced
from zgcompile.ir.demands import demand
from zgcompile.ir.program import ArgumentInput, Condition, GradientWrite, StateWrite, StepProgram
from zgcompile.ir.source import user_line_from_stack_trace

aten = torch.ops.aten
# Ops whose dynamic dimension is easier to make pad-safe in parts; a short list on purpose: the whole Core ATen table
# turns
# `stack` into a `cat` and a split of a non-leading dimension.
DECOMPOSED = [
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.l1_loss,
    aten.slice_backward,
    aten.select_backward,
]


class _SymbolMap(Interpreter):
    """Runs the stage-one FX graph and notes what each of its size symbols is called now."""

    def __init__(self, fx_graph: GraphModule) -> None:
        super().__init__(fx_graph)
        self.renamed: dict[sympy.Symbol, sympy.Basic] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        for old, new in zip(tree_leaves(n.meta.get("val")), tree_leaves(result), strict=False):
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                for a, b in zip(old.shape, new.shape, strict=True):
                    self._note(a, b)
            else:
                self._note(old, new)
        return result

    def _note(self, old: Any, new: Any) -> None:
        if isinstance(old, (torch.SymInt, torch.SymFloat)) and isinstance(new, (torch.SymInt, torch.SymFloat)):
            expr = old.node.expr
            if expr.is_Symbol:
                self.renamed.setdefault(expr, new.node.expr)


def functionalise(traced: Traced, arguments: list[ArgumentInput], lengths: int) -> StepProgram:
    """The `StepProgram` of a stage-one trace: no in-place op is left, each state write is an output."""
    shape_env = traced.shape_env
    shape_env.recording = False
    refuse_argument_writes(traced.fx_graph, arguments, lengths)
    refuse_fixed_lengths(traced, arguments, lengths)
    symbols = _SymbolMap(traced.fx_graph)
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in traced.inputs]

    # Their common type is OperatorBase, make_fx wants OpOverload: these are.
    decompositions: dict[Any, Callable[..., Any]] = get_decompositions(DECOMPOSED)
    decompositions[aten.binary_cross_entropy.default] = checked_binary_cross_entropy

    def run(*flat: Any) -> Any:
        return symbols.run(*flat, enable_io_processing=False)

    with traced.fake_mode, enable_python_dispatcher(), torch.no_grad(), preserve_node_meta():
        fx_graph = make_fx(
            torch.func.functionalize(run, remove="mutations"),
            tracing_mode="real",
            decomposition_table=decompositions,
        )(*inputs)
    program = _program(fx_graph, traced, arguments, lengths)
    renamed = symbols.renamed
    conditions = [Condition(p.expr.xreplace(renamed), p.value, p.where) for p in shape_env.preconditions.values()]
    conditions += _runtime_asserts(program, renamed)
    program.conditions = list({(c.expr, c.value): c for c in reversed(conditions)}.values())[::-1]
    # `_expr`: a comparison that came out equal (`weight_decay != 0`) makes `expr` the number itself.
    program.hyper_symbols = [h.node._expr for h in traced.inputs if isinstance(h, torch.SymFloat)]
    hyper_symbols = set(program.hyper_symbols)
    program.hyper_guards = [
        (g.expr, None) for g in shape_env.guards if g.expr.free_symbols and g.expr.free_symbols <= hyper_symbols
    ]
    program.equalities = _equalities(shape_env)
    return program


def checked_binary_cross_entropy(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    """aten.binary_cross_entropy in parts, with what its kernels assert and its decomposition leaves out."""
    for name, values in (("input", self), ("target", target)):
        demand(((values >= 0) & (values <= 1)).all(), f"binary_cross_entropy needs an {name} in [0, 1]")
    op = aten.binary_cross_entropy.default
    return get_decompositions([op])[op](self, target, weight, reduction)


def _runtime_asserts(program: StepProgram, renamed: Mapping[sympy.Symbol, sympy.Basic]) -> list[Condition]:
    """What tracing left to be true at run time (`x[1:] + y` needs equal sizes, `narrow` an end inside the source), as
    conditions: a batch that breaks one runs the user's own function, which raises as eager does. What holds for every
    count is left out."""
    born = {s: n for n in program.fx_graph.graph.nodes for s in (n.meta.get("unbacked_bindings") or {})}
    found: dict[sympy.Basic, Condition] = {}
    for asserts in program.shape_env.deferred_runtime_asserts.values():
        for runtime_assert in asserts:
            expr = runtime_assert.expr.xreplace(renamed)
            if (
                not isinstance(expr, sympy.logic.boolalg.Boolean)
                or not expr.free_symbols
                or not expr.free_symbols <= born.keys()
            ):
                continue
            anything = {s: ValueRanges(_least(born[s]), int_oo) for s in expr.free_symbols}
            if all(s.is_integer for s in anything) and not bound_sympy(expr, anything).is_singleton():
                where = user_line_from_stack_trace("".join(runtime_assert.stack.format()))
                found.setdefault(expr, Condition(expr, True, where))
    return list(found.values())


def _least(binder: Node) -> Any:
    """The least value of a symbol: a count is at least 0, an item may be anything."""
    return -int_oo if binder.target is aten._local_scalar_dense.default else 0


def _equalities(shape_env: Any) -> list[tuple[sympy.Symbol, sympy.Symbol]]:
    """Pairs of distinct symbols that tensor arithmetic needs equal (`x[a] + y[b]`): checked on the device."""
    pairs = []
    for asserts in shape_env.deferred_runtime_asserts.values():
        for runtime_assert in asserts:
            expr = runtime_assert.expr
            if isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs.is_Symbol:
                pairs.append((expr.lhs, expr.rhs))
    return pairs


def _program(fx_graph: GraphModule, traced: Traced, arguments: list[ArgumentInput], lengths: int) -> StepProgram:
    graph = fx_graph.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs = list(tree_leaves(output.args[0], is_leaf=lambda x: x is None))
    first_lifted = len(placeholders) - len(traced.lifted)
    written: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.copy_.default and node.args[0].op == "placeholder":
            target, value = node.args[:2]
            written[target] = value
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    user_outputs = outputs[: traced.user_outputs]
    for i, constant in traced.constants.items():
        user_outputs[i] = constant
    flat: list[Any] = list(user_outputs)
    gradient_writes = []
    live = iter(outputs[traced.user_outputs :])
    for lifted, outcome in traced.gradients:
        value = next(live)
        if outcome == "none":
            gradient_writes.append(GradientWrite(lifted, None))
        elif outcome == "new":
            gradient_writes.append(GradientWrite(lifted, len(flat)))
            flat.append(value)
    state_writes = []
    for placeholder, value in written.items():
        position = placeholders.index(placeholder)
        state_writes.append(StateWrite(position - first_lifted, len(flat)))
        flat.append(value)
    output.args = (flat,)
    fx_graph.graph.set_codegen(torch.fx.graph.CodeGen())
    fx_graph.recompile()
    return StepProgram(
        fx_graph=fx_graph,
        shape_env=traced.shape_env,
        lengths=lengths,
        arguments=arguments,
        hyperparameters=[site.path for site in traced.hypers],
        lifted=traced.lifted,
        user_outputs=traced.user_outputs,
        out_spec=traced.out_spec,
        state_writes=state_writes,
        gradient_writes=gradient_writes,
        conditions=[],
        equalities=[],
    )


def refuse_argument_writes(fx_graph: GraphModule, arguments: list[ArgumentInput], lengths: int) -> None:
    """The caller would see what the step wrote; a replay works on a copy.

    Raises:
        CaptureRefused: an op writes an argument or a view of one.
    """
    placeholders = [n for n in fx_graph.graph.nodes if n.op == "placeholder"][1 + lengths :]
    names = dict(zip(placeholders, (a.name for a in arguments), strict=False))
    for node in fx_graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, info in zip(node.args, node.target._schema.arguments, strict=False):
            if info.alias_info is None and "dynamic_rows" not in str(node.target):
                continue
            for source in [argument] if isinstance(argument, Node) else tree_leaves(argument):
                name = names.get(source) if isinstance(source, Node) else None
                if name is None:
                    continue
                if info.alias_info is not None and info.alias_info.is_write:
                    raise CaptureRefused(
                        f"the step writes its argument {name} in place",
                        where=node_line(node),
                        advice="write to a clone of it",
                    )
                names.setdefault(node, name)
            if "dynamic_rows" in str(node.target):
                break


def refuse_fixed_lengths(traced: Traced, arguments: list[ArgumentInput], lengths: int) -> None:
    """A length that the step itself fixes (`seeds.view(20, 2)`, `x[seeds] + table`) has no capacity to choose.

    Raises:
        CaptureRefused: naming the argument, its only length and the line that fixes it.
    """
    placeholders = [n for n in traced.fx_graph.graph.nodes if n.op == "placeholder"]
    groups = {node: group for group, node in enumerate(placeholders[1 : 1 + lengths])}
    for node in traced.fx_graph.graph.nodes:
        if node.target is not torch.ops.zgcompile.dynamic_rows.default:
            continue
        symbol = next(iter(node.meta["unbacked_bindings"]))
        length = traced.shape_env.replace(symbol)
        if not length.is_Integer:
            continue
        fixing = [a for a in traced.shape_env.deferred_runtime_asserts.get(symbol, ()) if isinstance(a.expr, sympy.Eq)]
        lines = (user_line_from_stack_trace("".join(a.stack.format())) for a in fixing)
        name = next(a.name for a in arguments if a.length == groups[node.args[1]])
        raise CaptureRefused(
            f"only {length} rows of the argument {name} fit here, but its length is to change from call to call",
            where=next((line for line in lines if line is not None), None),
            advice="take the size from the argument, n = x.shape[0]: .view(-1, ...), torch.zeros(n, ...), table[:n]",
        )


def node_line(node: Node) -> SourceLine | None:
    """The user's line that an FX node came from."""
    return user_line_from_stack_trace(node.meta.get("stack_trace") or "")
