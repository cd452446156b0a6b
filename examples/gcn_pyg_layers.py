"""PyG's layers over the sampler of sage_torch.py: `python examples/gcn_pyg_layers.py --conv gat --compile`."""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from input_graph import InputGraph, load
from sage_torch import sample_blocks
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

CONVS = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}


class Net(nn.Module):
    def __init__(self, conv, dims, dropout):
        super().__init__()
        self.convs = nn.ModuleList(conv(i, o) for i, o in itertools.pairwise(dims))
        self.dropout = dropout

    def forward(self, x, blocks):
        for layer, (conv, (row, col, dst_position, _)) in enumerate(zip(self.convs, blocks, strict=True)):
            # GCNConv has one node set: a layer runs over all nodes of its block, then keeps the destinations.
            x = conv(x, torch.stack([col, dst_position[row]]))[dst_position]
            if layer + 1 < len(self.convs):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


def make_step(model: nn.Module, opt: torch.optim.Optimizer, data: InputGraph, fanouts: list[int]):
    def train_step(seeds):
        nodes, blocks = sample_blocks(data.indptr, data.indices, seeds, fanouts)
        out = model(data.feat[nodes], blocks)
        loss = F.cross_entropy(out, data.label[seeds])
        opt.zero_grad()
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
    parser.add_argument("--conv", choices=CONVS, default="gcn")
    parser.add_argument("--fanout", default="10,5", help="neighbours a hop, seeds' hop first; all: --fanout=-1,-1")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="run the step through zgcompile")
    args = parser.parse_args(argv)
    args.fanouts = [int(f) for f in args.fanout.split(",")]
    return args


def build(args):
    torch.manual_seed(args.seed)
    data = load(args.data, args.device)
    dims = [data.feat.size(1)] + [args.hidden] * (len(args.fanouts) - 1) + [data.num_classes]
    model = Net(CONVS[args.conv], dims, args.dropout).to(args.device)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
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
    print(f"test accuracy {accuracy(model, data, data.test, len(args.fanouts)):.4f}")


if __name__ == "__main__":
    main()
