"""The sampling prefix: what the sizes of a step depend on, run alone at exact sizes and writing nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import key_get

from zgcompile.backend.checked_indices import insert_checks
from zgcompile.ir.program import StepProgram


def value_inputs(graph: Graph) -> dict[Node, frozenset[Node]]:
    """The placeholders that each node's value depends on. Arguments of one length share the size of the first of them,
    which is no dependence on its values."""
    reads: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            reads[node] = frozenset([node])
        else:
            sources = node.all_input_nodes
            if node.target is torch.ops.zgcompile.dynamic_rows_like.default:
                sources = sources[:1]
            reads[node] = frozenset().union(*(reads[source] for source in sources))
    return reads


class SamplingPrefix:
    """The nodes of a `StepProgram` that the size symbols `symbols` depend on.

    The FX graph is functional and its draws are keyed by an input, so that a run changes neither state nor a generator.
    Its indices are checked: a batch that nobody promised to be valid raises IndexError and harms no GPU.
    """

    def __init__(self, program: StepProgram, symbols: Collection[sympy.Symbol]) -> None:
        nodes = list(program.fx_graph.graph.nodes)
        self.binders: list[tuple[Node, Any]] = []
        self.symbols: list[sympy.Symbol] = []
        for node in nodes:
            for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
                if symbol in symbols:
                    self.symbols.append(symbol)
                    self.binders.append((node, path))
        needed = {node for node, _ in self.binders}
        for node in reversed(nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph, copies = Graph(), dict[Node, Node]()
        for node in nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        insert_checks(graph)
        graph.output(tuple(copies[node] for node, _ in self.binders))
        self.module = GraphModule(program.fx_graph, graph, "SamplingPrefix")
        self.inputs = [i for i, p in enumerate(program.placeholders) if p in needed]
        reads = value_inputs(program.fx_graph.graph)
        decisive = frozenset().union(*(reads[node] for node, _ in self.binders))
        self.arguments = [i for i, p in enumerate(program.argument_placeholders) if p in decisive]

    def counts(self, inputs: Sequence[Any]) -> list[int]:
        """The count of each of `symbols`, in order; `inputs` are those of the whole program. Raises what an op
        raises, IndexError for an index out of range."""
        with torch.no_grad():
            values = self.module(*[inputs[i] for i in self.inputs])
        return [int(key_get(v, path) if path else v) for v, (_, path) in zip(values, self.binders, strict=True)]
