"""The lowering as a whole: the engine's own checks, conditions of the trace, state writes behind the status."""

from __future__ import annotations

import pytest
import torch
from zgcompile.passes.lower import lower
from zgcompile.passes.rules import interpreter
from zgcompile.passes.rules.table import find_rule

from tests.passes.rules import harness
from tests.passes.rules.harness import CPU, POISONS, Case, Fixed, Hyper, Rows, prepare, run_bounded
from zgcompile.errors import InternalError
from zgcompile.ir.bounded import Pad
from zgcompile.ir.program import GradientWrite, StateWrite
from zgcompile.ir.status import Failure

LONG = torch.int64
N4 = Rows("n", (4,))


def with_rule(monkeypatch, op, rule):
    monkeypatch.setattr(interpreter, "find_rule", lambda o: rule if o == op else find_rule(o))


def run(case, counts=0, poison=None):
    subject = prepare(case)
    return run_bounded(subject, subject.batches[counts], poison)


SUM = Case("sum", lambda x: x.exp().sum(0), (N4,))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:3], "gave torch.float32"),
        (lambda x: x.double(), "expected torch.float32"),
        (lambda x: (x + 1, Pad.ZERO), "claims zero pads"),
    ],
)
def test_a_wrong_rule_is_an_internal_error(monkeypatch, result, message):
    with_rule(monkeypatch, torch.ops.aten.exp.default, lambda context, node, x: result(x.data))
    with pytest.raises(InternalError, match=message):
        run(Case("exp", lambda x: x.exp(), (N4,)), counts=1, poison=POISONS[0])


def test_a_claim_of_pads_in_range_is_checked(monkeypatch):
    table = Fixed((7,), LONG, 0, 5, proven=True)
    with_rule(monkeypatch, torch.ops.aten.index.Tensor, lambda context, node, t, i: (torch.full((9,), 5), Pad.IN_RANGE))
    with pytest.raises(InternalError, match="claims pads in"):
        run(Case("ids", lambda t, i: t[i], (table, Rows("n", (), LONG, 0, 7))), poison=POISONS[0])


def test_a_rule_that_lets_pads_through_is_caught(monkeypatch):
    with_rule(monkeypatch, torch.ops.aten.sum.dim_IntList, lambda context, node, x, dims: x.data.sum(dims))
    with pytest.raises(AssertionError):
        harness.check_case(SUM)


def test_the_branch_of_the_trace_is_a_condition():
    case = Case("branch", lambda x: x.sum() + 1 if x.shape[0] < 2 else x.sum(), (Rows("n"),))
    failed = run(case, counts=3).failed
    assert [c.failure for c in failed] == [Failure.PRECONDITION]
    assert failed[0].where.text.startswith("case = Case")
    assert run(case, counts=2).failed == []


def stateful(fn, *inputs):
    """A program whose last output is the new value of fixed input 0."""
    subject = prepare(Case("state", fn, inputs))
    subject.program.user_outputs -= 1
    subject.program.state_writes = [StateWrite(0, len(subject.program.outputs) - 1)]
    return subject


@pytest.mark.parametrize(("shift", "written"), [(0, True), (7, False)])
def test_state_is_written_only_when_all_is_well(shift, written):
    table = Fixed((7, 4))
    subject = stateful(lambda t, i: (t[i + shift].sum(), t * 2), table, Rows("n", (), LONG, 0, 7))
    lowered = lower(subject.program, subject.bounds, CPU)
    batch = subject.batches[1]
    key, length, rows, state = batch.padded(harness.CAPS, POISONS[0])
    before = state.clone()
    given = [key, length, rows, torch.zeros(0, dtype=torch.float64), state]
    front = [
        torch.zeros(t.shape, dtype=t.dtype) for t in lowered.example_inputs[: len(lowered.example_inputs) - len(given)]
    ]
    metadata, *_ = lowered.fx_graph(*front, *given)
    assert bool(lowered.layout.failed(metadata.tolist())) is not written
    assert torch.equal(state, before * 2 if written else before)
    assert lowered.written_lifted() == [0]


def test_gradients_are_written_to_their_buffers():
    subject = stateful(lambda t, x: (x.sum(), t + x.sum(0)), Fixed((4,)), N4)
    subject.program.state_writes = []
    subject.program.gradient_writes = [GradientWrite(0, 1)]
    lowered = lower(subject.program, subject.bounds, CPU)
    assert lowered.gradients == 1 and [t.shape for t in lowered.gradient_inputs] == [(4,)]
    batch = subject.batches[1]
    key, length, rows, state = batch.padded(harness.CAPS, POISONS[0])
    buffer = torch.full((4,), torch.nan)
    given = [key, length, rows, torch.zeros(0, dtype=torch.float64), state, buffer]
    front = [
        torch.zeros(t.shape, dtype=t.dtype) for t in lowered.example_inputs[: len(lowered.example_inputs) - len(given)]
    ]
    lowered.fx_graph(*front, *given)
    torch.testing.assert_close(buffer, state + rows[:8].sum(0))


def test_the_metadata_holds_true_counts_above_the_capacity():
    subject = prepare(Case("mask", lambda x, m: x[m].sum(), (Rows("n"), Rows("n", (), torch.bool))))
    bounds = subject.capped(0.0)
    bounds.caps.update({s: c for s, c in subject.bounds.caps.items() if c == harness.CAPS["n"]})
    ran = run_bounded(subject, subject.batches[0], POISONS[0], bounds)
    assert [c.failure for c in ran.failed] == [Failure.CAPACITY]


def test_nothing_of_the_trace_is_left_symbolic():
    subject = prepare(
        Case(
            "all",
            lambda x, i, h: (x[torch.unique(i)] * h, x.shape[0], x.sum().item()),
            (N4, Rows("n", (), LONG, 0, "n"), Hyper()),
        )
    )
    lowered = lower(subject.program, subject.bounds, CPU)
    assert [type(o).__name__ for o in lowered.outputs] == ["TensorOutput", "SizeOutput", "NumberOutput"]
    for node in lowered.fx_graph.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or all(isinstance(s, int) for s in value.shape)
