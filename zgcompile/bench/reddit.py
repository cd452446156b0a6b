"""A GraphSAGE step, eager and compiled, side by side on a synthetic Reddit: `python -m zgcompile.bench.reddit`.

fp32 with TF32 off, Adam, dropout 0.5, cross-entropy. Prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

import zgcompile
from zgcompile.bench.audit import audit
from zgcompile.bench.checks import CompiledStep, first_replay, input_response, memory_drift
from zgcompile.bench.memory_oracle import measured_bytes, oracle_bytes
from zgcompile.bench.result import BatchResult, result_table
from zgcompile.bench.sage import SAGE, batch_counts, exact_buffers, make_step
from zgcompile.bench.synthetic import SHAPES, SMALL, SyntheticGraph, power_law
from zgcompile.bench.timing import Spread, paired, time_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Settings:
    """What to run: `oracle_batches` are sampled for the memory oracle, `blocks` x `calls` steps are timed."""

    graph: SyntheticGraph
    dims: tuple[int, ...]  # features, hidden ..., classes
    fanouts: tuple[int, ...]  # the seeds' hop first
    device: str = "cpu"
    headroom: float | None = None
    blocks: int = 15
    calls: int = 20
    oracle_batches: int = 2000
    seed: int = 0
    eager_only: bool = False

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def batches(self, sizes: Sequence[int], stream: int) -> list[Tensor]:
        """A batch of distinct random ids (i64) for each size; each `stream` has its own draws."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1000 + stream)
        nodes = self.graph.label.numel()
        # clone: a slice would keep the whole permutation alive
        return [torch.randperm(nodes, generator=generator, device=self.device)[:size].clone() for size in sizes]


def cycle(step: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Callable[[int], Tensor]:
    return lambda i: step(batches[i % len(batches)])


def run_batch(settings: Settings, batch: int) -> BatchResult:
    """Measures one batch size: eager first, then the compiled step on its own copy of model and optimizer."""
    torch.manual_seed(settings.seed)
    model = SAGE(settings.dims).to(settings.device)
    twin = copy.deepcopy(model)
    eager = make_step(model, torch.optim.Adam(model.parameters(), lr=1e-3), settings.graph, settings.fanouts)
    batches = settings.batches([batch] * 20, stream=0)

    def call_all() -> None:
        for seeds in batches:
            eager(seeds)

    if settings.cuda:
        torch.mm(settings.graph.feat[:8], settings.graph.feat[:8].T)  # cuBLAS takes its workspace now, unmeasured
        memory = measured_bytes(call_all)
    else:
        memory = None
        call_all()
    times = [time_block(cycle(eager, batches), 0, settings.calls) for _ in range(settings.blocks)]
    result = BatchResult(batch, Spread.of(times), memory)
    observed = settings.batches([batch] * settings.oracle_batches, stream=1)
    counts = [batch_counts(settings.graph, seeds, settings.fanouts) for seeds in observed]
    result.oracle = oracle_bytes(exact_buffers(settings.dims), counts)
    if not settings.eager_only:
        measure_compiled(result, twin, eager, batches, settings)
    return result


def measure_compiled(
    result: BatchResult, model: SAGE, eager: Callable[[Tensor], Tensor], batches: Sequence[Tensor], settings: Settings
) -> None:
    """Compiles the step over `model`, checks it, times it against `eager`, and fills `result` in."""
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    fn = make_step(model, opt, settings.graph, settings.fanouts)
    step: CompiledStep = zgcompile.compile(fn, warmup=3, envelope=zgcompile.Envelope(headroom=settings.headroom))

    def start() -> None:
        result.startup = first_replay(step, batches)
        for seeds in batches:
            step(seeds)
        step.synchronize()

    if settings.cuda:
        result.compiled_memory = measured_bytes(start)
    else:
        start()
    result.parity_error = float(zgcompile.verify(fn, batches[0]).max_error)
    result.response = input_response(step, opt, batches[0], batches[1])
    result.timing = paired(cycle(eager, batches), cycle(step, batches), blocks=settings.blocks, calls=settings.calls)
    if settings.cuda:
        plan = step.kernel_plan()
        own = {kernel: kernel for kernel in plan}
        result.trace = audit(cycle(step, batches), own=own)
        result.unplanned = result.trace.unplanned(plan)
        generator = torch.Generator().manual_seed(settings.seed)
        lengths = torch.randint(1, result.batch + 1, (300,), generator=generator).tolist()
        result.drift = memory_drift(step, settings.batches(lengths, stream=2), settle=100)
    step.synchronize()
    names = ("calls", "replays", "eager_runs", "overflows", "captures", "host_reads", "envelope")
    stats = step.stats
    result.stats = {name: getattr(stats, name) for name in names}


def machine(device: str) -> dict[str, str]:
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {"machine": name, "torch": torch.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zgcompile.bench.reddit", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--shape", choices=SHAPES, default="reddit")
    parser.add_argument("--fanout", default="25,10", help="neighbours a hop, the seeds' hop first; one layer a hop")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--headroom", type=float, help="capacities are the largest counts seen x this; default: what costs least"
    )
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="steps a block")
    parser.add_argument("--oracle-batches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help=f"{SMALL.nodes} nodes, {SMALL.edges} edges, any shape")
    parser.add_argument("--eager-only", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = SMALL if args.small else SHAPES[args.shape]
    fanouts = tuple(int(f) for f in args.fanout.split(","))
    dims = (shape.features, *[args.hidden] * (len(fanouts) - 1), shape.classes)
    console = Console()
    with console.status(f"drawing {shape.edges:,} edges"):
        graph = power_law(shape, seed=args.seed, device=args.device)
    names = ("device", "headroom", "blocks", "calls", "oracle_batches", "seed", "eager_only")
    settings = Settings(graph, dims, fanouts, **{name: getattr(args, name) for name in names})
    results = []
    for batch in args.batch:
        with console.status(f"batch {batch}"):
            results.append(run_batch(settings, batch))
    about = machine(args.device)
    name = "small" if args.small else args.shape
    title = f"{name}, fanout {args.fanout}, hidden {args.hidden}: {', '.join(about.values())}"
    console.print(result_table(results, title))
    if not settings.cuda:
        console.print("without CUDA: no trace audit, no measured memory, no memory growth")
    record = about | {"shape": name, "fanout": fanouts, "hidden": args.hidden, "results": [asdict(r) for r in results]}
    console.out(json.dumps(record), highlight=False)  # unlike print, never wraps


if __name__ == "__main__":
    main()
