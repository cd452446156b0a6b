"""Whole steps on bounded tensors: whatever the pads hold, the valid results are the same bits, and too small a capacity
never faults."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from zgcompile.passes.clean_pads import clean_pads
from zgcompile.passes.infer_bounds import infer_bounds
from zgcompile.passes.rules.interpreter import Lowering

from zgcompile.backend.exact import run_exact
from zgcompile.frontend.arguments import Arguments, length_groups
from zgcompile.frontend.capture import capture
from zgcompile.frontend.guards import Guards
from zgcompile.ir.bounded import Bounded, Number
from zgcompile.ir.bounds import Bounds, Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.spans import Span
from zgcompile.ir.status import Failure
from zgcompile.keyed_numbers import step_key
from zgcompile.pipeline import canonical

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS = {
    "sage2": ("sage_torch", ["--hidden=16"]),
    "sage3": ("sage_torch", ["--layers=3", "--fanout=6,4,3", "--hidden=16", "--optimizer=sgd"]),
    "pyg-sage": ("gcn_pyg_layers", ["--conv=sage"]),
    "pyg-gcn": ("gcn_pyg_layers", ["--conv=gcn"]),
    "pyg-gat": ("gcn_pyg_layers", ["--conv=gat"]),
    "masked": ("masked_loss", []),
}
POISONS = {
    "huge": lambda dtype: (
        math.nan if dtype.is_floating_point else True if dtype == torch.bool else _int(dtype, 2**40 + 5)
    ),
    "wild": lambda dtype: (
        1e30 if dtype.is_floating_point else False if dtype == torch.bool else _int(dtype, -7_000_000_000)
    ),
}


def _int(dtype, value):
    info = torch.iinfo(dtype)
    return max(min(value, info.max), info.min)


def cases():
    """Every example on the CPU, where one thread makes every sum the same bits, and on a GPU."""
    for name in STEPS:
        yield pytest.param((name, "cpu"), id=name)
        yield pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=cases())
def subject(request):
    """A captured example: its program after one real step, observed sizes, proven table ranges, batches."""
    key, device = request.param
    name, options = STEPS[key]
    options = [*options, f"--device={device}"]
    if name == "gcn_pyg_layers":
        pytest.importorskip("torch_geometric")
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(f"whole_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step, _, _, data = module.build(module.arguments(options))
    seeds = data.train[:32]
    arguments = Arguments.of((seeds,), {})
    captured = capture(step, arguments, length_groups(arguments.lengths(), []))
    program = canonical(captured.program)
    step(seeds)
    guards = Guards(step, captured, arguments)
    observed = Observed()
    batches = [data.train[:32], data.train[20:40], data.train[5:8]]
    for number, batch in enumerate(batches):
        run = run_exact(program, inputs(captured, guards, batch, number))
        observed.note(run.counts, run.ids)
    tables = {i: Span(int(t.min()), int(t.max()) + 1) for i, t in guards.tables()}
    yield captured, guards, infer_bounds(program, observed, Envelope(headroom=1.3), tables), batches
    torch.set_num_threads(threads)


def inputs(captured, guards, batch, number):
    key, length = torch.tensor(step_key(3, number)), torch.tensor(batch.shape[0])
    lifted = [t.detach().clone() for t in guards.lifted]
    return [key.to(batch.device), length.to(batch.device), batch, *guards.hypers, *lifted]


def bounded_inputs(captured, guards, batch, number, cap, poison):
    key, length, seeds, *rest = inputs(captured, guards, batch, number)
    buffer = torch.full((cap,), poison(torch.int64), device=seeds.device)
    buffer[: seeds.shape[0]] = seeds
    hypers = [Number(torch.tensor(v, dtype=torch.float64, device=seeds.device)) for v in guards.hypers]
    return [key, length, buffer, *hypers, *rest[len(guards.hypers) :]]


def run_bounded(subject, batch, number, poison, bounds=None):
    """As the pipeline lowers it, on the device of the batch. Floats are summed in one order."""
    captured, guards, found, _ = subject
    bounds = bounds or found
    lowering = Lowering(
        captured.program, bounds, batch.device, poison, clean_pads(captured.program, bounds, batch.device)
    )
    symbol = next(iter(bounds.caps))
    with torch.no_grad():
        outputs, checks = lowering.run_flat(
            bounded_inputs(captured, guards, batch, number, bounds.caps[symbol], poison)
        )
    return [valid(lowering.context, v) for v in outputs], [c for c, flag in checks if bool(flag)]


def valid(context, value):
    if not isinstance(value, Bounded):
        return context.count_tensor(value) if type(value).__name__ == "Size" else getattr(value, "value", value)
    data = value.data
    for dim in value.dynamic():
        data = data.narrow(dim, 0, int(context.count(value.sizes[dim])))
    return data


def same_bits(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8) if a.dim() else a, b.contiguous().view(torch.uint8) if b.dim() else b
    )


@pytest.fixture(autouse=True)
def one_order(subject, monkeypatch):
    if subject[3][0].is_cuda:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_two_poisons_give_the_same_bits_and_eagers_results(subject, which):
    captured, guards, _, batches = subject
    results = [run_bounded(subject, batches[which], 40 + which, poison) for poison in POISONS.values()]
    assert results[0][1] == [] and results[1][1] == []
    assert all(same_bits(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    exact = run_exact(captured.program, inputs(captured, guards, batches[which], 40 + which)).outputs
    for got, want in zip(results[0][0], exact, strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def test_counts_may_shrink_from_call_to_call(subject):
    """The lowered FX graph keeps nothing of a larger batch: small alone equals small after large."""
    batches = subject[3]
    poison = POISONS["huge"]
    alone = run_bounded(subject, batches[2], 50, poison)[0]
    run_bounded(subject, batches[0], 51, poison)
    after = run_bounded(subject, batches[2], 50, poison)[0]
    assert all(same_bits(a, b) for a, b in zip(alone, after, strict=True))


@pytest.mark.parametrize("share", [0.7, 0.3, 0.0])
def test_too_small_capacities_set_the_status_and_never_fault(subject, share):
    _, _, bounds, batches = subject
    batch_symbol = next(iter(bounds.caps))
    caps = {s: c if s == batch_symbol else max(1, int(c * share)) for s, c in bounds.caps.items()}
    for poison in POISONS.values():
        _, failed = run_bounded(subject, batches[0], 60, poison, Bounds(caps, bounds.ids, bounds.names))
        assert any(check.failure is Failure.CAPACITY for check in failed)
