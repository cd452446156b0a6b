"""Drops what has no effect on the step and merges equal computations, masks and sizes included."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map

from zgcompile.ir.demands import is_demand
from zgcompile.ir.program import StepProgram
from zgcompile.pass_base import Pass

aten = torch.ops.aten
FORWARDED = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
DROPPED_NAMES = ("profiler.", "_assert_scalar", "sym_constrain_range", "_assert_tensor_metadata")


class Canonicalise(Pass):
    """Removes profiler marks, runtime asserts on sizes (now device checks) and detaches; merges equal pure nodes;
    removes dead ones."""

    name = "canonicalise"

    def apply(self, program: StepProgram) -> bool:
        graph = program.fx_graph.graph
        before = len(graph.nodes)
        decisive = {s for c in program.conditions for s in c.expr.free_symbols} | {
            s for pair in program.equalities for s in pair
        }

        def is_kept(node: Node) -> bool:
            """What eager demands of values stays, and a size that a condition of the trace is about is counted even
            where nothing else needs it."""
            bound = node.meta.get("unbacked_bindings") or {}
            return node.op in ("placeholder", "output") or is_demand(node) or not decisive.isdisjoint(bound)

        _drop(graph)
        graph.eliminate_dead_code(is_impure_node=is_kept)
        _merge_equal(graph, program.shape_env)
        graph.eliminate_dead_code(is_impure_node=is_kept)
        program.fx_graph.recompile()
        return len(graph.nodes) != before


def _drop(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if node.target in FORWARDED:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif any(name in str(node.target) for name in DROPPED_NAMES) and not node.users:
            graph.erase_node(node)


def _merge_equal(graph: Graph, shape_env: Any) -> None:
    """Every op is functional here and draws carry their ordinal, so equal op and arguments mean an equal value. Two
    equal binders make one size: the later symbol is replaced by the earlier."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = _value_key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        mine = list(node.meta.get("unbacked_bindings") or {})
        theirs = list(first.meta.get("unbacked_bindings") or {})
        if len(mine) != len(theirs):
            continue
        for old, new in zip(mine, theirs, strict=True):
            shape_env._set_replacement(old, new, "equal computations")
        node.replace_all_uses_with(first)
        graph.erase_node(node)


def _value_key(node: Node) -> Any:
    arguments = tree_map(
        lambda a: (type(a).__name__, a) if isinstance(a, (int, float, bool)) else a, (node.args, node.kwargs)
    )
    key = (
        node.target,
        repr(arguments),
        tuple(id(n) for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)),
    )
    return key if "empty" not in str(node.target) else None
