"""Masks that wait for the backward pass wait as bits:

    m: bool, read in the forward and again in the backward pass
    ->  k = pack_bits(m), behind m;  the late readers take unpack_bits(k)

A dropout's mask is then an eighth of a byte an element between the passes.
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from zgcompile.ir.aliases import viewed
from zgcompile.ir.calls import call
from zgcompile.pass_base import finished

# Below these a launch costs more than the memory is worth.
LEAST = 1 << 16  # elements
LONG = 32  # nodes
PACK, UNPACK = torch.ops.zgcompile.pack_bits.default, torch.ops.zgcompile.unpack_bits.default


def pack_masks(fx_graph: GraphModule) -> bool:
    """Pack large dense bool values that nothing reads for at least half of their life. Values stay the same bits. True
    when something changed."""
    graph = fx_graph.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    changed = False
    for node in list(graph.nodes):
        if not _is_large_mask(node):
            continue
        late = _late_readers(node, place)
        if not late:
            continue
        with graph.inserting_after(node):
            bits = call(graph, node, PACK, node)
        with graph.inserting_before(late[0]):
            mask = call(graph, late[0], UNPACK, bits, list(node.meta["val"].shape))
        for reader in late:
            reader.replace_input_with(node, mask)
        changed = True
    return finished(fx_graph, changed)


def _is_large_mask(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and node.target is not UNPACK
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.bool
        and value.numel() >= LEAST
        and value.is_contiguous()
        and viewed(node) is None
    )


def _late_readers(node: Node, place: dict[Node, int]) -> list[Node]:
    """The readers behind the longest pause, if that is half of the time from birth to the last reader or more. A mask
    that a view or the result of the step shows is left, as is one without an early reader: its birth could wait."""
    readers = sorted(node.users, key=place.__getitem__)
    if any(r.op == "output" or viewed(r) is node for r in readers):
        return []
    pauses = [place[b] - place[a] for a, b in itertools.pairwise(readers)]
    if not pauses or max(pauses) < max(LONG, (place[readers[-1]] - place[node]) // 2):
        return []
    return readers[pauses.index(max(pauses)) + 1 :]
