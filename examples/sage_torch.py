"""GraphSAGE with a sampler in plain torch: `python examples/sage_torch.py --layers 3 --fanout 10,5,5 --compile`."""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from input_graph import InputGraph, load
from torch import nn

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def sample_neighbours(indptr, indices, dst, fanout):
    """Up to `fanout` neighbours (-1: all) of each node of `dst`, as (position in dst, neighbour id)."""
    start = indptr[dst]
    degree = indptr[dst + 1] - start
    num = degree if fanout < 0 else degree.clamp(max=fanout)
    total = int(num.sum().item())
    row = torch.repeat_interleave(torch.arange(dst.numel(), device=dst.device), num, output_size=total)
    offset = torch.arange(total, device=dst.device) - (num.cumsum(0) - num)[row]
    if fanout >= 0:
        draw = (torch.rand(total, device=dst.device) * degree[row]).long()
        offset = torch.where(degree[row] > fanout, draw, offset)
    return row, indices[start[row] + offset]


def relabel(dst, neighbour):
    """The distinct ids, and where `dst` and `neighbour` are among them."""
    nodes, inverse = torch.unique(torch.cat([dst, neighbour]), return_inverse=True)
    return nodes, inverse[: dst.numel()], inverse[dst.numel() :]


def sample_blocks(indptr, indices, seeds, fanouts):
    """The ids the first layer reads, and a block (row, col, positions of dst, number of dst) for each layer."""
    blocks, dst = [], seeds
    for fanout in fanouts:
        row, neighbour = sample_neighbours(indptr, indices, dst, fanout)
        nodes, dst_position, col = relabel(dst, neighbour)
        blocks.insert(0, (row, col, dst_position, dst.numel()))
        dst = nodes
    return dst, blocks


class SAGEConv(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.neighbour = nn.Linear(in_features, out_features)
        self.root = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x, row, col, dst_position, num_dst):
        total = torch.zeros(num_dst, x.size(1), device=x.device).index_add(0, row, x[col])
        degree = torch.zeros(num_dst, device=x.device).index_add(0, row, torch.ones_like(row, dtype=x.dtype))
        return self.neighbour(total / degree.clamp(min=1).unsqueeze(1)) + self.root(x[dst_position])


class GraphSAGE(nn.Module):
    def __init__(self, dims, dropout):
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(i, o) for i, o in itertools.pairwise(dims))
        self.dropout = dropout

    def forward(self, x, blocks):
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(x, *block)
            if layer + 1 < len(self.convs):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


def make_step(model: nn.Module, opt: torch.optim.Optimizer, data: InputGraph, fanouts: list[int]):
    def train_step(seeds):
        opt.zero_grad()
        nodes, blocks = sample_blocks(data.indptr, data.indices, seeds, fanouts)
        out = model(data.feat[nodes], blocks)
        loss = F.cross_entropy(out, data.label[seeds])
        loss.backward()
        opt.step()
        return loss.detach()

    return train_step


@torch.no_grad()
def accuracy(model, data, ids, layers, batch=512):
    model.eval()
    correct = 0
    for seeds in ids.split(batch):
        nodes, blocks = sample_blocks(data.indptr, data.indices, seeds, [-1] * layers)
        correct += int((model(data.feat[nodes], blocks).argmax(1) == data.label[seeds]).sum())
    model.train()
    return correct / ids.numel()


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a CSR .npz file; without it a small planted partition")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--fanout", default="10,5", help="neighbours a hop, seeds' hop first; all: --fanout=-1,-1")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="run the step through zgcompile")
    args = parser.parse_args(argv)
    args.fanouts = [int(f) for f in args.fanout.split(",")]
    if len(args.fanouts) != args.layers:
        parser.error(f"--fanout {args.fanout} names {len(args.fanouts)} hops for --layers {args.layers}")
    return args


def build(args):
    torch.manual_seed(args.seed)
    data = load(args.data, args.device)
    dims = [data.feat.size(1)] + [args.hidden] * (args.layers - 1) + [data.num_classes]
    model = GraphSAGE(dims, args.dropout).to(args.device)
    opt = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    return make_step(model, opt, data, args.fanouts), model, opt, data


def main(argv=None):
    args = arguments(argv)
    train_step, model, _, data = build(args)
    if args.compile:
        import zgcompile

        train_step = zgcompile.compile(train_step)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(args.epochs):
        order = data.train[torch.randperm(data.train.numel(), generator=shuffle).to(args.device)]
        losses = [train_step(seeds) for seeds in order.split(args.batch)]
        print(f"epoch {epoch} loss {torch.stack(losses).mean().item():.4f}")
    print(f"test accuracy {accuracy(model, data, data.test, args.layers):.4f}")


if __name__ == "__main__":
    main()
