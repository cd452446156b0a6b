"""Backwards that only compare a forward tensor keep the outcome, one bit an element, in place of the tensor.

    threshold_backward(g, x, t)          ->  k = pack_bits(x <= t), behind x;  where(unpack_bits(k), 0, g)
    leaky_relu_backward(g, x, slope, _)  ->  k = pack_bits(x > 0), behind x;   where(unpack_bits(k), g, g * slope)

`hardtanh_backward` is not among them: where x is NaN, ATen's vectorised loop gives 0 and its scalar loop the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from zgcompile.ir.aliases import storage_root, viewed
from zgcompile.ir.calls import call
from zgcompile.pass_base import finished

aten = torch.ops.aten
THRESHOLD, LEAKY = aten.threshold_backward.default, aten.leaky_relu_backward.default


def keep_comparisons(fx_graph: GraphModule) -> bool:
    """Rewrite `threshold_backward` and `leaky_relu_backward` of a tensor computed in the step that nothing reads later.

    A comparison that the code generator sees whole would be recomputed from the float tensor; `zgcompile::pack_bits`,
    opaque to it, is where the float ends. Results are the same bits, those of a NaN in x included, in the same strides
    (a NaN in a bfloat16 gradient stays some NaN: ATen's CPU loop for that type makes it anew). True when something
    changed.
    """
    graph = fx_graph.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    backwards: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if _only_compares(node):
            backwards.setdefault(storage_root(_compared(node)), []).append(node)
    changed = False
    for root, nodes in backwards.items():
        if root.op == "call_function" and _pays(root, nodes, place):
            kept: dict[Any, Node] = {}
            for node in nodes:
                _rewrite(graph, node, kept)
            changed = True
    return finished(fx_graph, changed)


def _compared(node: Node) -> Node:
    x = node.args[1]
    assert isinstance(x, Node)
    return x


def _only_compares(node: Node) -> bool:
    """A backward of the table on floats of one type, whose limit is a number of that type: both forms compare the same
    numbers, and whose strides `where` gives too, with a dense condition: that is what unpacking makes."""
    if node.target not in (THRESHOLD, LEAKY):
        return False
    values = [v for v in (n.meta.get("val") for n in (node, *node.all_input_nodes)) if isinstance(v, FakeTensor)]
    if len(values) != 3:  # so the gradient is not the tensor itself
        return False
    out, grad, x = values
    limit = _limit(node)
    return (
        x.is_floating_point()
        and x.element_size() > 1
        and (grad.dtype, grad.shape) == (x.dtype, x.shape)
        and isinstance(limit, (int, float))
        and torch.tensor(limit, dtype=x.dtype).item() == limit
        and torch.where(x.new_empty(x.shape, dtype=torch.bool), grad, grad).stride() == out.stride()
        and storage_root(node.all_input_nodes[0]) is not storage_root(_compared(node))
    )


def _limit(node: Node) -> Any:
    return node.args[2] if node.target is THRESHOLD else 0


def _pays(root: Node, backwards: list[Node], place: dict[Node, int]) -> bool:
    """No other reader of the memory is later than the last backward, and most of the time from `root` to there it has
    none. A tensor that the gradient of a weight reads shortly before its backward is held until then in any case: the
    comparison would come on top. Time is counted in nodes."""
    last = max((place[n] for n in _readers(root) - set(backwards)), default=place[root])
    return max(place[n] for n in backwards) - last > last - place[root]


def _readers(root: Node) -> set[Node]:
    """Nodes that read the memory of `root`, under whatever name."""
    readers: set[Node] = set()
    names = [root]
    while names:
        name = names.pop()
        for user in name.users:
            if viewed(user) is name:
                names.append(user)
            else:
                readers.add(user)
    return readers


def _rewrite(graph: Graph, node: Node, kept: dict[Any, Node]) -> None:
    grad, x = node.all_input_nodes
    compare = aten.le.Scalar if node.target is THRESHOLD else aten.gt.Scalar
    key = (x, compare, _limit(node))
    if key not in kept:
        with graph.inserting_after(x):
            comparison = call(graph, x, compare, x, _limit(node))
        with graph.inserting_after(comparison):
            kept[key] = call(graph, x, torch.ops.zgcompile.pack_bits.default, comparison)
    with graph.inserting_before(node):
        size = list(node.meta["val"].shape)
        outcome = call(graph, node, torch.ops.zgcompile.unpack_bits.default, kept[key], size)
        if node.target is THRESHOLD:
            value = node.meta["val"]
            zero = call(graph, node, aten.full.default, [], 0, dtype=value.dtype, device=value.device)
            result = call(graph, node, aten.where.self, outcome, zero, grad)
        else:
            scaled = call(graph, node, aten.mul.Tensor, grad, node.args[2])
            result = call(graph, node, aten.where.self, outcome, grad, scaled)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
