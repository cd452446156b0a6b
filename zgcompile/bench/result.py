"""What the benchmark measured at one batch size, and its table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zgcompile.bench.audit import TraceAudit
    from zgcompile.bench.checks import InputResponse, MemoryDrift, Startup
    from zgcompile.bench.memory_oracle import MeasuredMemory, OraclePeak
    from zgcompile.bench.timing import PairedTiming, Spread


@dataclass
class BatchResult:
    """What was measured at one batch size, None where it was skipped: milliseconds a step, bytes of memory."""

    batch: int
    eager_ms: Spread
    eager_memory: MeasuredMemory | None = None
    oracle: OraclePeak | None = None
    timing: PairedTiming | None = None
    startup: Startup | None = None
    stats: dict[str, object] = field(default_factory=dict)
    parity_error: float | None = None
    response: InputResponse | None = None
    compiled_memory: MeasuredMemory | None = None
    drift: MemoryDrift | None = None
    trace: TraceAudit | None = None
    unplanned: dict[str, tuple[float, int]] | None = None


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"


def result_rows(r: BatchResult) -> dict[str, str]:
    """Label -> text for the table. What was skipped is missing."""
    rows = {"eager ms": str(r.timing.a if r.timing else r.eager_ms)}
    if r.timing:
        rows |= {"compiled ms": str(r.timing.b), "eager / compiled": str(r.timing.ratio)}
    if r.startup:
        rows["first replay"] = f"{r.startup.seconds:.1f} s, call {r.startup.calls}"
    if r.parity_error is not None:
        rows["largest error to eager"] = f"{r.parity_error:.1e}"
    if r.response:
        rows["new inputs, new loss"] = "yes" if r.response.responds and r.response.repeats else f"NO: {r.response}"
    rows |= {name: str(value) for name, value in r.stats.items() if name != "envelope"}
    if r.oracle:
        rows["memory: exact-size oracle"] = mebibytes(r.oracle.bytes)
    if r.eager_memory:
        rows["memory: eager"] = mebibytes(r.eager_memory.allocated)
    if r.compiled_memory and r.oracle:
        share = f" ({r.compiled_memory.allocated / r.oracle.bytes:.2f} x oracle)"
        rows["memory: compiled, from the first call"] = mebibytes(r.compiled_memory.allocated) + share
        rows["memory: the same, reserved"] = mebibytes(r.compiled_memory.reserved)
    if r.drift:
        rows["memory: growth in 200 lengths"] = mebibytes(r.drift.reserved)
    if r.trace and r.timing:
        t = r.trace
        rows |= {
            "CUDA Graph launches a step": f"{t.per_step(t.graph_launches):g}",
            "kernels a step": ", ".join(f"{owner} {t.per_step(n):g}" for owner, n in sorted(t.owners.items())),
            "kernel launches outside": f"{t.per_step(t.direct_launches):g}",
            "copies a step": ", ".join(f"{kind} {t.per_step(n):g}" for kind, n in t.copies.items()) or "none",
            "host waits a step": ", ".join(f"{name} {t.per_step(n):g}" for name, n in t.host_syncs.items()) or "none",
            "GPU busy": f"{t.per_step(t.busy_us) / (r.timing.b.median * 1e3):.0%}",
            "own kernels not as planned": str(r.unplanned or "none"),
        }
    return rows


def result_table(results: Sequence[BatchResult], title: str) -> Table:
    table = Table("", *(f"batch {r.batch}" for r in results), title=title)
    columns = [result_rows(r) for r in results]
    for label in dict.fromkeys(label for rows in columns for label in rows):
        table.add_row(label, *(rows.get(label, "-") for rows in columns))
    return table
