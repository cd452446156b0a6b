"""Sums of matrix products go into one buffer, by the product's own addition:

    add(addmm(bias, a, V), mm(b, W))  ->  accumulate_mm(addmm(bias, a, V), b, W)

as in every layer with weights for a node and for its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from zgcompile.pass_base import finished

aten = torch.ops.aten
ACCUMULATE = torch.ops.zgcompile.accumulate_mm.default
PRODUCTS = {aten.mm.default, aten.addmm.default, ACCUMULATE}


def accumulate_products(fx_graph: GraphModule) -> bool:
    """Rewrite sums of two matrix products that nothing else reads, the later one a plain `mm`; sums of three nest.

    The same numbers are added in another order, so floats differ by rounding. True when something changed.
    """
    graph = fx_graph.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    changed = False
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        if not all(_is_product(summand, node) for summand in node.args):
            continue
        total, product = sorted(node.args, key=place.__getitem__)
        if product.target is not aten.mm.default or total is product:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(ACCUMULATE, (total, *product.args))
        fused.meta = dict(node.meta)
        place[fused] = place[node]
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)
        changed = True
    return finished(fx_graph, changed)


def _is_product(summand: Any, total: Node) -> bool:
    """A float matrix product of the form of the sum, read by the sum alone."""
    if not isinstance(summand, Node) or summand.target not in PRODUCTS or len(summand.users) != 1:
        return False
    mine, whole = summand.meta["val"], total.meta["val"]
    return bool(mine.is_floating_point()) and (mine.shape, mine.dtype) == (whole.shape, whole.dtype)
