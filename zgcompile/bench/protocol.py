"""What exactly-once costs: `python -m zgcompile.bench.protocol`, on a GPU.

Two comparisons in one run on the step of `zgcompile.bench.reddit`: a call that waits for the status record against one
that does not (and so may not return exact counts, nor look at the status), and writes of state behind the status
against plain ones. Prints one line each and one JSON line.

Inductor picks block sizes by timing them, and two compilations of one step may differ by more than the gate costs. So a
gated and a plain step are compiled as a pair over one cache, where a kernel that both have is tuned once; there are
several pairs, each over empty caches, and each kind comes first in turn. The ratio of every pair is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor
from torch._inductor.utils import fresh_cache

import zgcompile
from zgcompile.backend.cuda_graph import CudaGraphReplay
from zgcompile.bench.checks import CompiledStep, first_replay
from zgcompile.bench.reddit import cycle, machine
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.bench.synthetic import SHAPES, SyntheticGraph, power_law
from zgcompile.bench.timing import PairedTiming, paired
from zgcompile.passes import lower


def compiled(graph: SyntheticGraph, batches: Sequence[Tensor], hidden: int) -> CompiledStep:
    """A replaying step over its own model and optimizer."""
    torch.manual_seed(0)
    model = SAGE((graph.feat.shape[1], hidden, int(graph.label.max()) + 1)).to(graph.label.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step: CompiledStep = zgcompile.compile(make_step(model, optimizer, graph, (25, 10)))
    first_replay(step, batches)
    return step


def not_waiting(step: Callable[[int], object]) -> Callable[[int], object]:
    """The same calls, each of which takes the record as it finds it."""

    def call(i: int) -> object:
        with mock.patch.object(CudaGraphReplay, "_await", return_value=None):
            return step(i)

    return call


def ungated(build: Callable[[], CompiledStep]) -> CompiledStep:
    """A step whose state is written whatever the status says."""
    with mock.patch.object(lower, "_write_gated", lambda good, target, new: target.copy_(new)):
        return build()


@dataclass(frozen=True)
class Protocol:
    """`waiting`: waiting / not waiting. `gates`: gated / plain, one timing a pair of compilations."""

    waiting: PairedTiming
    gates: list[PairedTiming]

    @property
    def gate(self) -> float:
        """The median over the pairs of gated / plain."""
        return statistics.median(timing.ratio.median for timing in self.gates)


def measure(graph: SyntheticGraph, batch: int, hidden: int, blocks: int, pairs: int) -> Protocol:
    nodes = graph.label.numel()
    batches = [torch.randperm(nodes, device=graph.label.device)[:batch].clone() for _ in range(20)]

    def gated() -> CompiledStep:
        return compiled(graph, batches, hidden)

    def plain() -> CompiledStep:
        return ungated(gated)

    gates = []
    for pair in range(pairs):
        order = (gated, plain) if pair % 2 == 0 else (plain, gated)
        with fresh_cache():
            steps = {build: cycle(build(), batches) for build in order}
        gates.append(paired(steps[gated], steps[plain], blocks=blocks, calls=50))
    waiting = paired(steps[gated], not_waiting(steps[gated]), blocks=blocks, calls=50)
    return Protocol(waiting, gates)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m zgcompile.bench.protocol", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--shape", choices=SHAPES, default="reddit")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=31)
    parser.add_argument("--pairs", type=int, default=3, help="of a gated and a plain step")
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    graph = power_law(SHAPES[args.shape], device="cuda")
    console = Console()
    record: dict[str, object] = dict(machine("cuda"))
    for batch in args.batch:
        found = measure(graph, batch, args.hidden, args.blocks, args.pairs)
        for name, timing in [("waiting / not waiting", found.waiting), *(("gated / plain", t) for t in found.gates)]:
            console.out(f"batch {batch}: {name}: {timing.a} / {timing.b} ms, ratio {timing.ratio}", highlight=False)
        console.out(f"batch {batch}: gated / plain, median of the pairs: {found.gate:.4f}", highlight=False)
        record[str(batch)] = asdict(found) | {"gate": found.gate}
    console.out(json.dumps(record), highlight=False)


if __name__ == "__main__":
    main()
