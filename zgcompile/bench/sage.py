"""The benchmark's subject: a GraphSAGE step in plain torch, and the memory that it needs at exact sizes.

Layers count from 1 to L. Layer i turns the `nodes{i-1}` rows of its sources into the `nodes{i}` rows of its
destinations over `edges{i}` sampled edges; `nodes{L}` are the seeds, `nodes0` the ids whose features are read.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zgcompile.bench.memory_oracle import Counts, LiveBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zgcompile.bench.synthetic import SyntheticGraph

Block = tuple[Tensor, Tensor, Tensor, int]


def sample_neighbours(indptr: Tensor, indices: Tensor, dst: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    start = indptr[dst]
    degree = indptr[dst + 1] - start
    num = degree.clamp(max=fanout)
    total = int(num.sum().item())
    row = torch.repeat_interleave(torch.arange(dst.numel(), device=dst.device), num, output_size=total)
    offset = torch.arange(total, device=dst.device) - (num.cumsum(0) - num)[row]
    draw = (torch.rand(total, device=dst.device) * degree[row]).long()
    return row, indices[start[row] + torch.where(degree[row] > fanout, draw, offset)]


def relabel(dst: Tensor, neighbour: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nodes, inverse = torch.unique(torch.cat([dst, neighbour]), return_inverse=True)
    return nodes, inverse[: dst.numel()], inverse[dst.numel() :]


def sample_blocks(graph: SyntheticGraph, seeds: Tensor, fanouts: Sequence[int]) -> tuple[Tensor, list[Block]]:
    """The ids the first layer reads, and (row, col, positions of dst, number of dst) a layer, the first one first."""
    blocks: list[Block] = []
    dst = seeds
    for fanout in fanouts:
        row, neighbour = sample_neighbours(graph.indptr, graph.indices, dst, fanout)
        nodes, position, col = relabel(dst, neighbour)
        blocks.insert(0, (row, col, position, dst.numel()))
        dst = nodes
    return dst, blocks


class SAGEConv(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.neighbour = nn.Linear(in_features, out_features)
        self.root = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor, row: Tensor, col: Tensor, position: Tensor, num_dst: int) -> Tensor:
        total = torch.zeros(num_dst, x.size(1), device=x.device).index_add(0, row, x[col])
        degree = torch.zeros(num_dst, device=x.device).index_add(0, row, torch.ones_like(row, dtype=x.dtype))
        return self.neighbour(total / degree.clamp(min=1).unsqueeze(1)) + self.root(x[position])


class SAGE(nn.Module):
    def __init__(self, dims: Sequence[int], dropout: float = 0.5) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(i, o) for i, o in itertools.pairwise(dims))
        self.dropout = dropout

    def forward(self, x: Tensor, blocks: Sequence[Block]) -> Tensor:
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(x, *block)
            if layer + 1 < len(self.convs):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


def make_step(
    model: nn.Module, opt: torch.optim.Optimizer, graph: SyntheticGraph, fanouts: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """The step as a user writes it: `train_step(seeds: i64[n]) -> loss`, a detached f32 scalar."""

    def train_step(seeds: Tensor) -> Tensor:
        nodes, blocks = sample_blocks(graph, seeds, fanouts)
        out = model(graph.feat[nodes], blocks)
        loss = F.cross_entropy(out, graph.label[seeds])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    return train_step


def batch_counts(graph: SyntheticGraph, seeds: Tensor, fanouts: Sequence[int]) -> Counts:
    """Samples a batch and counts it: `nodes0` ... `nodes{L}`, `edges1` ... `edges{L}`."""
    nodes, blocks = sample_blocks(graph, seeds, fanouts)
    counts = {"nodes0": nodes.numel()}
    for layer, (row, _, _, num_dst) in enumerate(blocks, start=1):
        counts |= {f"nodes{layer}": num_dst, f"edges{layer}": row.numel()}
    return counts


def exact_buffers(dims: Sequence[int]) -> list[LiveBuffer]:
    """Buffers of one step at exact sizes in a frugal order of work: int32 ids, no message or gathered feature table is
    ever whole in memory, activations in place, one byte an element for ReLU and dropout together. `dims` is D, hidden
    ..., C; Adam's state is there throughout.

    Ops: L samplings (the last layer's first), L forward layers, the loss, L backward layers (the last one first), the
    optimizer.
    """
    layers = len(dims) - 1

    def sampled(i: int) -> int:
        return layers - i

    def forward(i: int) -> int:
        return layers + i - 1

    def backward(i: int) -> int:
        return 3 * layers + 1 - i

    loss, optimizer = 2 * layers, 3 * layers + 1

    def rows(name: str, of: str, width: int, first: int, last: int) -> LiveBuffer:
        return LiveBuffer(name, lambda counts: counts[of] * width, first, last)

    def fixed(name: str, size: int, first: int, last: int) -> LiveBuffer:
        return LiveBuffer(name, lambda _: size, first, last)

    buffers = [
        rows("logits", f"nodes{layers}", 4 * dims[-1], forward(layers), loss),
        rows("grad logits", f"nodes{layers}", 4 * dims[-1], loss, backward(layers)),
    ]
    for i in range(1, layers + 1):
        src, dst, wide, out = f"nodes{i - 1}", f"nodes{i}", dims[i - 1], dims[i]
        parameters = 4 * (2 * wide * out + out)
        # The first layer needs no gradient of its input: its edges die in the forward pass.
        edges_last = backward(i) if i > 1 else forward(i)
        buffers += [
            rows(f"ids{i - 1}", src, 4, sampled(i), sampled(i - 1) if i > 1 else forward(1)),
            rows(f"degree{i}", dst, 4, sampled(i), edges_last),
            rows(f"position{i}", dst, 4, sampled(i), edges_last),
            rows(f"col{i}", f"edges{i}", 4, sampled(i), edges_last),
            rows(f"mean{i}", dst, 4 * wide, forward(i), backward(i)),
            rows(f"root{i}", dst, 4 * wide, forward(i), backward(i)),
            fixed(f"grad parameters{i}", parameters, backward(i), optimizer),
            fixed(f"adam state{i}", 2 * parameters, 0, optimizer),
        ]
        if i < layers:
            buffers += [
                rows(f"hidden{i}", dst, 4 * out, forward(i), forward(i + 1)),
                rows(f"active{i}", dst, out, forward(i), backward(i)),
                rows(f"grad hidden{i}", dst, 4 * out, backward(i + 1), backward(i)),
            ]
        if i > 1:
            buffers.append(rows(f"grad mean{i}", dst, 4 * wide, backward(i), backward(i)))
    return buffers
