"""New nodes in an FX graph, as complete as those of a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# What describes one node alone and does not pass to those that take its place.
OF_ONE_NODE = ("val", "tensor_meta", "eager_input_vals")


def call(graph: Graph, origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node where `graph` inserts, for the same line of the user's as `origin`, with its fake value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in origin.meta.items() if k not in OF_ONE_NODE}
    values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    with origin.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **named)
    return node
