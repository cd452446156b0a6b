"""What a step really did on the GPU, read from a CUPTI trace: launches, kernels, copies, host waits, busy share."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from zgcompile.errors import ZgError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

WINDOW = "zgcompile.audit"
INDUCTOR, ATEN = "inductor", "aten"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME = {"cuda_runtime", "cuda_driver"}
GRAPH_LAUNCH = {"cudaGraphLaunch", "cuGraphLaunch"}
HOST_SYNCS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}
LAUNCH = re.compile(r"(cuda|cu)Launch(Cooperative)?Kernel(ExC|Ex)?")
ALLOCATION = re.compile(r"cuda(Malloc|Free)(Async|Host|Managed)?|cudaHostAlloc|cuMem(Alloc|Free|Create|Map)(Async)?")
VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")  # CUPTI spells some entry points with ABI suffixes


@dataclass(frozen=True)
class KernelUse:
    """A kernel of the trace. `owner` is an own op's name, "inductor", or "aten", cuBLAS included; `us` is in all."""

    name: str
    owner: str
    launches: int
    us: float


@dataclass(frozen=True)
class TraceAudit:
    """Totals over `steps` calls. `wall_us` runs from the first call to the end of the last call and of its GPU work."""

    steps: int
    wall_us: float
    busy_us: float  # union of the kernels' intervals
    graph_launches: int
    direct_launches: int  # kernel launches outside a CUDA Graph
    kernels: tuple[KernelUse, ...]  # by microseconds, largest first
    copies: Mapping[str, int]  # "DtoH", "HtoD", "DtoD", "memset"; "pageable" repeats those that make the host wait
    host_syncs: Mapping[str, int]  # by runtime call
    allocations: int  # cudaMalloc, cudaFree and kin: each can wait for the device

    @property
    def busy_share(self) -> float:
        """Busy time over the traced wall time, which profiling lengthens: an untraced step time is fairer."""
        return self.busy_us / self.wall_us if self.wall_us else 0.0

    @property
    def owners(self) -> dict[str, int]:
        """Kernel launches by owner."""
        total: Counter[str] = Counter()
        for kernel in self.kernels:
            total[kernel.owner] += kernel.launches
        return dict(total)

    def per_step(self, total: float) -> float:
        return total / self.steps

    def unplanned(self, plan: Mapping[str, int]) -> dict[str, tuple[float, int]]:
        """Own ops whose launches a step differ from `plan`, as (seen, planned): (0, n) was never captured."""
        seen = self.owners
        return {op: (seen.get(op, 0) / self.steps, n) for op, n in plan.items() if seen.get(op, 0) != n * self.steps}

    def table(self, top: int = 10) -> Table:
        table = Table("a step", "count", "us", title=f"trace of {self.steps} steps")
        rows = [("CUDA Graph launches", self.graph_launches), ("kernel launches outside one", self.direct_launches)]
        rows += [(f"copy {kind}", n) for kind, n in self.copies.items()]
        rows += [*self.host_syncs.items(), ("allocations", self.allocations)]
        for label, n in rows:
            table.add_row(label, f"{self.per_step(n):g}", "")
        table.add_section()
        for owner, n in sorted(self.owners.items()):
            us = sum(k.us for k in self.kernels if k.owner == owner)
            table.add_row(f"kernels of {owner}", f"{self.per_step(n):g}", f"{self.per_step(us):.1f}")
        table.add_section()
        for kernel in self.kernels[:top]:
            table.add_row(kernel.name[:70], f"{self.per_step(kernel.launches):g}", f"{self.per_step(kernel.us):.1f}")
        table.add_row(f"busy {self.busy_share:.0%} of", "", f"{self.per_step(self.wall_us):.1f}", end_section=True)
        return table


def owner_of(kernel: str, own: Mapping[str, str]) -> str:
    """The op in `own` (op name -> substring of its kernels' names) that owns `kernel`; the longest match wins."""
    hits = [(len(part), op) for op, part in own.items() if part in kernel]
    if hits:
        return max(hits)[1]
    return INDUCTOR if kernel.startswith("triton_") else ATEN


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def parse(events: Iterable[Mapping[str, Any]], *, steps: int, own: Mapping[str, str] | None = None) -> TraceAudit:
    """Reads the `traceEvents` of a Chrome trace (times in microseconds) as torch.profiler exports it.

    Only what the host called within the `zgcompile.audit` annotation counts, and the GPU work that those calls launched
    (joined by correlation id); without the annotation, everything does. Raises ZgError on `steps` below 1.
    """
    if steps < 1:
        raise ZgError(f"an audit of {steps} steps", advice="trace at least one step")
    complete = [e for e in events if e.get("ph") == "X"]
    windows = [e for e in complete if e.get("name") == WINDOW and e.get("cat") == "user_annotation"]
    begin = min((e["ts"] for e in windows), default=float("-inf"))
    close = max((e["ts"] + e["dur"] for e in windows), default=float("inf"))

    calls = [e for e in complete if e.get("cat") in RUNTIME and begin <= e["ts"] <= close]
    launched = {e["args"]["correlation"] for e in calls if "correlation" in e.get("args", {})}
    work = [e for e in complete if e.get("cat") in GPU_WORK and _launched_by(e, launched, begin)]
    names = Counter(VERSION.sub("", e["name"]) for e in calls)

    spans: dict[str, list[tuple[float, float]]] = {}
    copies: Counter[str] = Counter()
    for e in work:
        if e["cat"] == "kernel":
            spans.setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
        elif e["cat"] == "gpu_memset":
            copies["memset"] += 1
        else:
            copies[re.sub(r"^Memcpy (\w+).*", r"\1", e["name"])] += 1
            copies["pageable"] += "Pageable" in e["name"]
    kernels = [KernelUse(n, owner_of(n, own or {}), len(s), sum(b - a for a, b in s)) for n, s in spans.items()]
    everything = [(e["ts"], e["ts"] + e["dur"]) for e in [*work, *(windows or calls)]]
    return TraceAudit(
        steps=steps,
        wall_us=max((b for _, b in everything), default=0.0) - min((a for a, _ in everything), default=0.0),
        busy_us=union_us(s for span in spans.values() for s in span),
        graph_launches=sum(names[n] for n in GRAPH_LAUNCH),
        direct_launches=sum(n for name, n in names.items() if LAUNCH.fullmatch(name)),
        kernels=tuple(sorted(kernels, key=lambda k: -k.us)),
        copies={kind: n for kind, n in sorted(copies.items()) if n},
        host_syncs={name: names[name] for name in sorted(HOST_SYNCS) if names[name]},
        allocations=sum(n for name, n in names.items() if ALLOCATION.fullmatch(name)),
    )


def _launched_by(event: Mapping[str, Any], launched: set[int], begin: float) -> bool:
    correlation = event.get("args", {}).get("correlation")
    return correlation in launched if correlation is not None else event["ts"] >= begin


def audit(fn: Callable[[int], object], *, steps: int = 20, own: Mapping[str, str] | None = None) -> TraceAudit:
    """Traces `fn(0)` to `fn(steps - 1)`, the device idle before and after. Raises ZgError without CUDA."""
    if not torch.cuda.is_available():
        raise ZgError("a trace audit needs a CUDA device", advice="call zgcompile.bench.audit.parse on a saved trace")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities):  # the first trace of a process pays for CUPTI's start
        torch.cuda.synchronize()
    with profile(activities=activities) as prof:
        torch.cuda.synchronize()
        with record_function(WINDOW):
            for i in range(steps):
                fn(i)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text())["traceEvents"], steps=steps, own=own)
