"""The memory of a captured step beside what exact sizes would need: `python -m zgcompile.bench.memory`, on a GPU.

peak: bytes of live tensors above what was allocated before the first call, at most: gradients, optimizer state, static
buffers, and what lives inside a step. oracle: a hand-made plan of the same step at exact sizes, each buffer freed after
its last use (`zgcompile.bench.sage.exact_buffers`), for the largest of many batches. eager: the peak of the untouched
step. pool: the CUDA Graph's segments, which the allocator takes in units of 2 MiB. Apart: tables of the size of the
node set, which live inside the step, and cuBLAS's workspace on the capture stream, a constant of the library.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zgcompile
from zgcompile.backend.cuda_graph import CudaGraphReplay
from zgcompile.backend.tight_pool import capture_stream
from zgcompile.bench.memory_oracle import measured_bytes, oracle_bytes
from zgcompile.bench.reddit import machine
from zgcompile.bench.sage import SAGE, batch_counts, exact_buffers, make_step
from zgcompile.bench.synthetic import SHAPES, SyntheticGraph, power_law
from zgcompile.kernels import native

FANOUTS = (25, 10)


@dataclass(frozen=True)
class StepMemory:
    """Bytes, but for the counts."""

    shape: str
    batch: int
    peak: int
    tables: int  # of which of the size of the node set
    oracle: int
    eager: int
    pool: int
    workspace: int  # apart

    @property
    def ratio(self) -> float:
        return (self.peak - self.tables) / self.oracle


def settled() -> int:
    """Bytes of live tensors, with nothing in flight."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def workspace() -> int:
    """Bytes that live outside every pool on the capture stream: what cuBLAS holds there."""
    stream = capture_stream(torch.device("cuda", torch.cuda.current_device())).cuda_stream
    segments = torch.cuda.memory_snapshot()
    return sum(s["active_size"] for s in segments if s["stream"] == stream and tuple(s["segment_pool_id"]) == (0, 0))


def eager_peak(graph: SyntheticGraph, dims: Sequence[int], batches: Sequence[Tensor]) -> int:
    """Bytes of live tensors that untouched steps need at most."""
    model = SAGE(dims).to(graph.label.device)
    bias = torch.zeros(512, device=graph.label.device)
    torch.addmm(bias, graph.feat[:512], graph.feat[:512].T)  # cuBLAS takes its workspaces now
    step = make_step(model, torch.optim.Adam(model.parameters(), lr=1e-3), graph, FANOUTS)
    return measured_bytes(lambda: [step(b) for b in batches]).allocated


def measure(name: str, graph: SyntheticGraph, batch: int, hidden: int, probability: float, observed: int) -> StepMemory:
    device, nodes = graph.label.device, graph.label.numel()
    dims = (graph.feat.shape[1], hidden, int(graph.label.max()) + 1)
    torch.manual_seed(0)

    def seeds() -> Tensor:
        return torch.randperm(nodes, device=device)[:batch].clone()

    batches = [seeds() for _ in range(20)]
    peak = eager_peak(graph, dims, batches)
    counts = [batch_counts(graph, seeds(), FANOUTS) for _ in range(observed)]
    oracle = oracle_bytes(exact_buffers(dims), counts).bytes
    model = SAGE(dims).to(device)
    base, space = settled(), workspace()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    envelope = zgcompile.Envelope(max_overflow_probability=probability)
    step = zgcompile.compile(make_step(model, optimizer, graph, FANOUTS), envelope=envelope)
    for b in batches:
        step(b)
    replay = step.specialisations[0].replay
    assert isinstance(replay, CudaGraphReplay) and step.stats.replays
    space = workspace() - space
    steady = settled() - base - space
    tables = sum(node_tables(replay))
    return StepMemory(name, batch, steady + inside(replay), tables, oracle, peak, replay.pool_bytes(), space)


def inside(replay: CudaGraphReplay) -> int:
    """Bytes of live tensors inside one step, at most: a run of what was captured."""
    stream = capture_stream(replay.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        replay.function(*replay._inputs())
        torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def node_tables(replay: CudaGraphReplay) -> list[int]:
    """Bytes of the largest bitmap of ids that a `unique` of the step works on; one lives at a time."""
    module = native()
    found = [n.args[2] for n in replay.lowered.fx_graph.graph.nodes if n.target is torch.ops.zgcompile.unique.default]
    return [max(module.unique_workspace(bound) for bound in found)] if module is not None and found else []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m zgcompile.bench.memory", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["reddit", "products"])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--probability", type=float, default=1e-2, help="of an overflow, for the envelope")
    parser.add_argument("--oracle-batches", type=int, default=2000)
    args = parser.parse_args(argv)
    rows: list[StepMemory] = []
    for shape in args.shape:
        graph = power_law(SHAPES[shape], device="cuda")
        for batch in args.batch:
            rows.append(measure(shape, graph, batch, args.hidden, args.probability, args.oracle_batches))
        del graph
    about = machine("cuda")
    table = Table(title=f"memory of a step in MB: {', '.join(about.values())}")
    for column in ("shape", "batch", "peak", "tables", "oracle", "ratio", "eager", "pool", "cuBLAS"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = [f"{b / 1e6:.1f}" for b in (row.peak, row.tables, row.oracle)]
        rest = [f"{b / 1e6:.1f}" for b in (row.eager, row.pool, row.workspace)]
        table.add_row(row.shape, str(row.batch), *sizes, f"{row.ratio:.2f}", *rest)
    console = Console()
    console.print(table)
    console.out(json.dumps(about | {"rows": [asdict(r) for r in rows]}), highlight=False)


if __name__ == "__main__":
    main()
