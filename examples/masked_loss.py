"""Semi-supervised training on subgraphs, with boolean masks: `python examples/masked_loss.py --keep 0.5 --compile`.

A batch is any nodes, labelled or not; the loss is taken on those of the subgraph that are in the training set.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from input_graph import InputGraph, load
from torch import nn


def sample_subgraph(indptr, indices, seeds, hops, keep):
    """Walks `hops` out, keeping each edge with probability `keep`: the node ids, and the edges as positions in them."""
    src, dst, frontier = [], [], seeds
    for _ in range(hops):
        degree = indptr[frontier + 1] - indptr[frontier]
        connected = degree > 0
        frontier, degree = frontier[connected], degree[connected]
        row = torch.repeat_interleave(degree)
        offset = torch.arange(row.numel(), device=row.device) - (degree.cumsum(0) - degree)[row]
        kept = (torch.rand(row.numel(), device=row.device) < keep).nonzero().squeeze(1)
        neighbour = indices[(indptr[frontier][row] + offset)[kept]]
        src.append(neighbour)
        dst.append(frontier[row[kept]])
        frontier = neighbour.unique()
    nodes, inverse = torch.cat([seeds, *src, *dst]).unique(return_inverse=True)
    src_position, dst_position = inverse[seeds.numel() :].chunk(2)
    return nodes, src_position, dst_position


class MeanNet(nn.Module):
    def __init__(self, in_features, hidden, classes):
        super().__init__()
        self.first = nn.Linear(2 * in_features, hidden)
        self.second = nn.Linear(2 * hidden, classes)

    def forward(self, x, src, dst):
        x = F.relu(self.first(torch.cat([x, neighbour_mean(x, src, dst)], 1)))
        return self.second(torch.cat([x, neighbour_mean(x, src, dst)], 1))


def neighbour_mean(x, src, dst):
    total = torch.zeros_like(x).index_add(0, dst, x[src])
    degree = torch.zeros_like(x[:, 0]).index_add(0, dst, torch.ones_like(dst, dtype=x.dtype))
    return total / degree.clamp(min=1).unsqueeze(1)


def make_step(model: nn.Module, opt: torch.optim.Optimizer, data: InputGraph, hops: int, keep: float):
    trains = torch.zeros(data.num_nodes, dtype=torch.bool, device=data.label.device)
    trains[data.train] = True

    def train_step(seeds):
        opt.zero_grad()
        nodes, src, dst = sample_subgraph(data.indptr, data.indices, seeds, hops, keep)
        out = model(data.feat[nodes], src, dst)
        mask = trains[nodes]
        label = data.label[nodes][mask]
        # A batch without a training node has loss 0, not 0 / 0.
        loss = F.cross_entropy(out[mask], label, reduction="sum") / mask.sum().clamp(min=1)
        loss.backward()
        opt.step()
        return loss.detach(), (out[mask].argmax(1) == label).sum(), mask.sum()

    return train_step


@torch.no_grad()
def accuracy(model, data, ids):
    dst = torch.repeat_interleave(torch.arange(data.num_nodes, device=ids.device), data.indptr.diff())
    out = model(data.feat, data.indices, dst)
    return (out[ids].argmax(1) == data.label[ids]).float().mean().item()


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a CSR .npz file; without it a small planted partition")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hops", type=int, default=2)
    parser.add_argument("--keep", type=float, default=0.5, help="probability of keeping an edge")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="run the step through zgcompile")
    return parser.parse_args(argv)


def build(args):
    torch.manual_seed(args.seed)
    data = load(args.data, args.device)
    model = MeanNet(data.feat.size(1), args.hidden, data.num_classes).to(args.device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return make_step(model, opt, data, args.hops, args.keep), model, opt, data


def main(argv=None):
    args = arguments(argv)
    train_step, model, _, data = build(args)
    if args.compile:
        import zgcompile

        train_step = zgcompile.compile(train_step)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(args.epochs):
        losses, correct, count = [], torch.zeros((), device=args.device), torch.zeros((), device=args.device)
        for seeds in torch.randperm(data.num_nodes, generator=shuffle).to(args.device).split(args.batch):
            loss, batch_correct, batch_count = train_step(seeds)
            losses.append(loss)
            correct += batch_correct
            count += batch_count
        loss = torch.stack(losses).mean()
        print(f"epoch {epoch} loss {loss.item():.4f} training accuracy {(correct / count).item():.4f}")
    print(f"test accuracy {accuracy(model, data, data.test):.4f}")


if __name__ == "__main__":
    main()
