"""What `verify` returns, and how two results of one step are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from zgcompile.frontend.undo import same_bits
from zgcompile.ir.program import StepProgram

Kind = Literal["output", "gradient", "state"]

# Relative to the largest magnitude of a tensor: what a sum in another order may change. A ReLU whose input is all but
# zero
# may open or shut by it, so a gradient can move by one row's share: seen up to 3e-4 between two correct runs in
# float32.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
RTOL_TF32 = 5e-3
SMALL_GRADIENT = 1e-2  # of the largest gradient of the step: a smaller one is rounding noise of larger terms


@dataclass(frozen=True)
class Entry:
    """One tensor of one run against the eager function.

    `way`: "FX graph" (the dynamic FX graph at exact sizes) or "compiled step" (lowered and replayed). `max_abs_error`
    in the tensor's own unit; `max_rel_error` and `tolerance` relative to its largest magnitude, that of a small
    gradient to 1/100 of the step's largest gradient, and without what a gradient of rounding noise leaves open
    (`compared`). inf where shapes, dtypes or the places of NaN and infinity differ.
    """

    name: str
    kind: Kind
    way: str
    max_abs_error: float
    max_rel_error: float
    tolerance: float
    ok: bool


@dataclass
class Report:
    """Every output, gradient and state of one step, three ways. `note` says what the compiled step does with this batch
    when it is not a replay."""

    step: str
    entries: list[Entry] = field(default_factory=list)
    note: str = ""

    @property
    def ok(self) -> bool:
        return all(entry.ok for entry in self.entries)

    @property
    def max_error(self) -> float:
        """The largest relative error."""
        return max((entry.max_rel_error for entry in self.entries), default=0.0)

    @property
    def failures(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.ok]

    def table(self) -> Table:
        """A rich table: a row for each tensor, a column for each run."""
        ways = list(dict.fromkeys(entry.way for entry in self.entries))
        table = Table(title=f"{self.step} against the eager function", caption=self.note or None)
        table.add_column("tensor")
        table.add_column("kind")
        for way in ways:
            table.add_column(f"{way}: error", justify="right")
        table.add_column("tolerance", justify="right")
        table.add_column("")
        rows: dict[tuple[str, str], dict[str, Entry]] = {}
        for entry in self.entries:
            rows.setdefault((entry.name, entry.kind), {})[entry.way] = entry
        for (name, kind), by_way in rows.items():
            errors = [f"{by_way[way].max_rel_error:.1e}" if way in by_way else "" for way in ways]
            ok = all(entry.ok for entry in by_way.values())
            tolerance = min(entry.tolerance for entry in by_way.values())
            table.add_row(
                name,
                kind,
                *errors,
                f"{tolerance:.0e}" if tolerance else "exact",
                "ok" if ok else "DIFFERS",
                style=None if ok else "bold red",
            )
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as text:
            console.print(self.table())
        return text.get()


@dataclass
class Result:
    """What one run of a step left: named outputs, gradients (None: no gradient) and state by index of the lifted
    input."""

    outputs: list[tuple[str, Any]]
    gradients: dict[int, torch.Tensor | None]
    state: dict[int, torch.Tensor]


@dataclass
class Tolerances:
    """`rtol`, `atol` override the defaults: RTOL by dtype, raised where the FX graph computes in half precision or in
    TF32; an atol of rtol / 1000 for outputs and none for gradients and state, which may all be tiny."""

    rtol: float | None
    atol: float | None
    least: float
    number: float  # of a returned Python float

    @classmethod
    def of(cls, program: StepProgram, device: torch.device, rtol: float | None, atol: float | None) -> Tolerances:
        values = [n.meta.get("val") for n in program.fx_graph.graph.nodes]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
        half = max((RTOL[d] for d in dtypes if d in (torch.float16, torch.bfloat16)), default=0.0)
        tf32 = RTOL_TF32 if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest" else 0.0
        return cls(rtol, atol, max(half, tf32), max((RTOL.get(d, 0.0) for d in dtypes), default=RTOL[torch.float64]))

    def relative(self, dtype: torch.dtype) -> float:
        return self.rtol if self.rtol is not None else max(RTOL.get(dtype, RTOL[torch.float32]), self.least)

    def absolute(self, kind: Kind, rtol: float) -> float:
        return self.atol if self.atol is not None else rtol * 1e-3 * (kind == "output")


def compared(
    program: StepProgram, eager: Result, got: Result, before: dict[int, torch.Tensor], way: str, tolerances: Tolerances
) -> list[Entry]:
    """The entries of one run; `before` is the state before the step.

    An optimizer that normalises (Adam) turns a relative error of a gradient into one of the update, however small both
    are. So where an element's gradient is known to a share only (tolerance over its size, at most 1), its parameter and
    optimizer state are free by four times that share of the tensor's largest update; where it is rounding noise alone,
    by a hundred updates, as noise is another order of magnitude the next time and Adam squares it.
    """
    entries = [
        _compare(name, "output", way, expected, value, tolerances)
        for (name, expected), (_, value) in zip(eager.outputs, got.outputs, strict=True)
    ]
    live = [g for g in eager.gradients.values() if g is not None]
    floor = SMALL_GRADIENT * max((_magnitude(g) for g in live), default=0.0)
    open_: dict[
        str, torch.Tensor
    ] = {}  # parameter -> how much of each element's gradient, at most all of it, is within tolerance
    for index, expected in eager.gradients.items():
        name = program.lifted[index].name
        entries.append(
            _compare(f"{name}.grad", "gradient", way, expected, got.gradients[index], tolerances, floor=floor)
        )
        if expected is not None:
            allowed = tolerances.relative(expected.dtype) * max(_magnitude(expected), floor)
            open_[name] = (allowed / expected.abs().double()).nan_to_num(1.0).clamp(max=1.0)
    for index, value in eager.state.items():
        lifted = program.lifted[index]
        owner = lifted.name.rpartition(".")[0] if lifted.kind == "state" else lifted.name
        slack = None
        if owner in open_ and open_[owner].shape == value.shape:
            share = torch.where(open_[owner] < 1, 4 * open_[owner], 100.0)
            slack = share * _magnitude(value.double() - before[index].double())
        kind: Kind = "gradient" if lifted.kind == "grad" else "state"
        entries.append(_compare(lifted.name, kind, way, value, got.state[index], tolerances, slack=slack))
    return entries


def _magnitude(tensor: torch.Tensor) -> float:
    size = tensor.abs() if tensor.dtype.is_complex else tensor.double().abs()
    finite = size.nan_to_num(0.0, 0.0, 0.0)
    return finite.max().item() if finite.numel() else 0.0


def _compare(
    name: str,
    kind: Kind,
    way: str,
    expected: Any,
    got: Any,
    tolerances: Tolerances,
    *,
    floor: float = 0.0,
    slack: torch.Tensor | None = None,
) -> Entry:
    different = Entry(name, kind, way, math.inf, math.inf, 0.0, False)
    same = Entry(name, kind, way, 0.0, 0.0, 0.0, True)
    rtol = None
    if isinstance(expected, float) and isinstance(got, float):
        expected, got = (
            torch.tensor(expected, dtype=torch.float64, device="cpu"),
            torch.tensor(got, dtype=torch.float64, device="cpu"),
        )
        rtol = tolerances.rtol if tolerances.rtol is not None else max(tolerances.number, tolerances.least)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return same if type(expected) is type(got) and expected == got else different
    if expected.shape != got.shape or expected.dtype != got.dtype or expected.device != got.device:
        return different
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        if torch.equal(expected, got):
            return same
        off = (expected.double() - got.double()).abs().max().item()
        return Entry(name, kind, way, off, off / max(_magnitude(expected), 1.0), 0.0, False)
    odd = ~expected.isfinite()
    if not torch.equal(odd, ~got.isfinite()) or not same_bits(expected[odd], got[odd]):
        return different
    rtol = tolerances.relative(expected.dtype) if rtol is None else rtol
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    error = (expected.to(wide) - got.to(wide)).abs().masked_fill(odd, 0.0).flatten()
    if not error.numel():
        return same
    scale = max(_magnitude(expected), floor)
    beyond = (error if slack is None else error - slack.flatten()).max().clamp(min=0).item()
    allowed = tolerances.absolute(kind, rtol) + rtol * scale
    relative = beyond / scale if scale else (math.inf if beyond else 0.0)
    return Entry(name, kind, way, error.max().item(), relative, allowed / scale if scale else rtol, beyond <= allowed)


def first_failures(entries: Sequence[Entry], shown: int = 3) -> str:
    """ "name (way): error", worst first."""
    worst = sorted(entries, key=lambda e: -e.max_rel_error)[:shown]
    return ", ".join(
        f"{e.name} ({e.way}: relative error {e.max_rel_error:.1e}, tolerance {e.tolerance:.0e})" for e in worst
    )
