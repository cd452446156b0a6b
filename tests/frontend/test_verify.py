"""`verify` passes on a right compiler, fails on a planted fault, and leaves no trace either way."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zgcompile.passes import lower

import zgcompile
from zgcompile.errors import BadInput, CaptureRefused, VerificationFailed
from zgcompile.frontend import specialisation
from zgcompile.frontend.eager_time import eager_seconds

ROWS, FEATURES, CLASSES = 40, 6, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(FEATURES, CLASSES)
        self.norm = nn.BatchNorm1d(CLASSES)
        self.epochs = [1]

    def forward(self, x):
        return self.norm(self.lin(F.dropout(x, 0.3, self.training)))


class Setup:
    """A step with draws, a dynamic size, an Adam update, buffers, and a table that it writes."""

    def __init__(self, small=False, device="cpu"):
        torch.manual_seed(0)
        self.model = (nn.Linear(FEATURES, CLASSES, bias=False) if small else Net()).to(device)
        self.opt = (torch.optim.SGD if small else torch.optim.Adam)(self.model.parameters(), lr=0.01)
        self.seen = torch.zeros(ROWS, dtype=torch.int64, device=device)
        feat, label = torch.randn(ROWS, FEATURES, device=device), torch.arange(ROWS, device=device) % CLASSES
        model, opt, seen = self.model, self.opt, self.seen

        def train_step(seeds):
            chosen = seeds[torch.rand(seeds.numel(), device=seeds.device) < 0.8]
            loss = F.cross_entropy(model(feat[chosen]), label[chosen])
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen.index_add_(0, chosen, torch.ones_like(chosen))
            return {"loss": loss.detach(), "count": chosen.numel(), "value": loss.item(), "chosen": chosen}

        self.step = train_step

    def held(self):
        """Everything that a step may change, by identity and by value."""
        tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()]) | {"seen": self.seen}
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        state = {
            (i, k): v
            for i, p in enumerate(self.model.parameters())
            if p in self.opt.state
            for k, v in self.opt.state[p].items()
        }
        every = [*tensors.values(), *state.values(), *[g for g in grads.values() if g is not None]]
        return {
            "identities": [(str(k), id(v)) for table in (tensors, grads, state) for k, v in table.items()],
            "values": [t.detach().clone() for t in every],
            "versions": [t._version for t in every],
            "state keys": list(self.opt.state.keys()),
            "attributes": [(name, dict(vars(m))) for name, m in self.model.named_modules()],
            "epochs": list(getattr(self.model, "epochs", ())),
            "groups": [dict(g) for g in self.opt.param_groups],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0),
            "numpy": np.random.get_state()[1].copy(),
            "python": random.getstate(),
        }


def assert_untouched(before, after):
    for key in before:
        a, b = before[key], after[key]
        if key in ("values", "torch", "cuda", "numpy"):
            pairs = zip(a, b, strict=True) if key == "values" else [(torch.as_tensor(a), torch.as_tensor(b))]
            assert all(torch.equal(x, y) for x, y in pairs), key
        elif key == "state keys":
            assert list(map(id, a)) == list(map(id, b))
        elif key == "groups":
            assert [{k: id(v) for k, v in g.items()} for g in a] == [{k: id(v) for k, v in g.items()} for g in b]
        elif key == "attributes":
            assert [(n, {k: id(v) for k, v in d.items()}) for n, d in a] == [
                (n, {k: id(v) for k, v in d.items()}) for n, d in b
            ]
        else:
            assert a == b, key


@pytest.fixture(scope="module")
def trained():
    """A compiled step that replays, and its Setup."""
    setup = Setup()
    step = zgcompile.compile(setup.step, warmup=2)
    for n in (20, 20, 8, 8):
        step(torch.arange(n))
    assert step.stats.replays
    return setup, step


@pytest.mark.parametrize("started", [False, True])
def test_a_plain_function_passes_and_nothing_changes(started):
    setup = Setup()
    if started:
        setup.step(torch.arange(20))
    before = setup.held()
    report = zgcompile.verify(setup.step, torch.arange(5, 25))
    assert_untouched(before, setup.held())
    assert report.ok
    assert report.max_error < 1e-4
    assert report.note == ""
    found = {(e.name, e.kind) for e in report.entries}
    assert {(e.way) for e in report.entries} == {"FX graph", "compiled step"}
    assert {
        ("output['loss']", "output"),
        ("output['count']", "output"),
        ("output['value']", "output"),
        ("output['chosen']", "output"),
    } <= found
    assert {
        ("model.lin.weight.grad", "gradient"),
        ("model.lin.weight", "state"),
        ("model.lin.weight.exp_avg", "state"),
    } <= found
    assert {
        ("model.norm.running_mean", "state"),
        ("model.norm.num_batches_tracked", "state"),
        ("seen", "state"),
    } <= found
    assert not setup.opt.state or started
    assert "model.lin.weight.exp_avg" in str(report)
    assert "DIFFERS" not in str(report)


def test_the_current_capture_is_what_is_checked(trained, monkeypatch):
    setup, step = trained
    before, stats, replay = setup.held(), step.stats, step.specialisations[0].replay
    monkeypatch.setattr(specialisation, "lowered_step", None)  # nothing is lowered anew
    assert zgcompile.verify(step, torch.arange(18)).ok
    assert_untouched(before, setup.held())
    assert step.stats == stats
    assert step.specialisations[0].replay is replay


def test_adams_host_counters_are_no_round_trips(trained):
    lines = [trip.where.text.split()[0] for trip in trained[1].specialisations[0].program.round_trips]
    assert lines == ["chosen", "return"]  # the mask, loss.item()


def test_training_goes_on_as_if_nothing_had_been_checked():
    results = []
    for check in (False, True):
        setup = Setup(small=True)
        step = zgcompile.compile(setup.step, warmup=1)
        torch.manual_seed(1)
        losses = []
        for n in (20, 20, 15):
            losses.append(step(torch.arange(n))["loss"])
            if check:
                zgcompile.verify(step, torch.arange(12))
        results.append(torch.stack([*losses, setup.model.weight.sum()]))
    assert torch.equal(*results)


def test_an_overflow_is_checked_at_exact_sizes(trained):
    setup, step = trained
    before = setup.held()
    report = zgcompile.verify(step, torch.arange(ROWS))
    assert_untouched(before, setup.held())
    assert {e.way for e in report.entries} == {"FX graph"}
    assert "overflows" in report.note


def plant_wrong_update(monkeypatch):
    write = lower._write_gated
    monkeypatch.setattr(
        lower, "_write_gated", lambda good, old, new: write(good, old, new * 1.01 if new.is_floating_point() else new)
    )


def plant_wrong_op(monkeypatch):
    canonical = specialisation.canonical

    def wrong(program):
        program = canonical(program)
        for node in program.fx_graph.graph.nodes:
            if node.target is torch.ops.aten._log_softmax.default:
                node.target = torch.ops.aten._softmax.default
        program.fx_graph.recompile()
        return program

    monkeypatch.setattr(specialisation, "canonical", wrong)


@pytest.mark.parametrize(
    ("plant", "way", "name"),
    [(plant_wrong_update, "compiled step", "model.weight"), (plant_wrong_op, "FX graph", "output['loss']")],
)
def test_a_planted_fault_is_found_and_undone(monkeypatch, plant, way, name):
    setup = Setup(small=True)
    setup.step(torch.arange(20))
    before = setup.held()
    plant(monkeypatch)
    with pytest.raises(VerificationFailed, match="differs from the eager function") as failed:
        zgcompile.verify(setup.step, torch.arange(20))
    assert_untouched(before, setup.held())
    report = failed.value.report
    assert not report.ok
    assert (name, way) in {(e.name, e.way) for e in report.failures}
    assert "DIFFERS" in str(report)
    assert failed.value.where.text == "def train_step(seeds):"
    if way == "compiled step":
        assert all(e.ok for e in report.entries if e.way == "FX graph")


def test_an_overflow_that_writes_is_found(monkeypatch):
    setup = Setup(small=True)
    setup.step(torch.arange(20))
    before = setup.held()
    line = setup.step.__code__.co_firstlineno + 1
    step = zgcompile.compile(setup.step, envelope=zgcompile.Envelope(caps={f"test_verify.py:{line}": 4}))
    report = zgcompile.verify(step, torch.arange(20))
    assert "overflows" in report.note
    write = lower._write_gated
    monkeypatch.setattr(lower, "_write_gated", lambda good, old, new: write(torch.ones_like(good), old, new))
    with pytest.raises(VerificationFailed, match="and yet the replay wrote"):
        zgcompile.verify(step, torch.arange(20))
    assert_untouched(before, setup.held())


def test_what_the_step_itself_raises_passes_and_is_undone():
    setup = Setup(small=True)
    before = setup.held()
    with pytest.raises(IndexError):
        zgcompile.verify(setup.step, torch.arange(ROWS, 2 * ROWS))
    assert_untouched(before, setup.held())


def test_a_refused_step_says_where():
    def train_step(x):
        if x.sum() > 0:
            return x + 1
        return x

    with pytest.raises(CaptureRefused, match="control flow") as refused:
        zgcompile.verify(train_step, torch.ones(5))
    assert refused.value.where.text == "if x.sum() > 0:"
    with pytest.raises(BadInput, match="empty batch"):
        zgcompile.verify(train_step, torch.ones(0))


def test_nan_in_the_same_places_agrees_in_float64():
    table = torch.tensor([float("nan"), 1.0, float("inf"), -2.0], dtype=torch.float64)

    def train_step(ids):
        kept = ids[ids > 0]
        return table[ids] * 3, table[kept].sum()

    report = zgcompile.verify(train_step, torch.tensor([0, 1, 2, 3]))
    assert report.ok
    assert next(e.tolerance for e in report.entries if e.name == "output[0]") < 1e-8


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_on_a_gpu_adams_counters_stay_where_they_were(lowering):
    setup = Setup(device="cuda")
    setup.step(torch.arange(20, device="cuda"))
    counters = [state["step"] for state in setup.opt.state.values()]
    assert {c.device.type for c in counters} == {"cpu"}
    before = setup.held()
    assert zgcompile.verify(setup.step, torch.arange(25, device="cuda")).ok
    assert_untouched(before, setup.held())
    step = zgcompile.compile(setup.step, warmup=1, lowering=lowering)
    for n in (20, 20, 15):
        step(torch.arange(n, device="cuda"))
    before, stats = setup.held(), step.stats
    assert stats.replays
    assert zgcompile.verify(step, torch.arange(18, device="cuda")).ok
    assert eager_seconds(step.specialisations[0], [torch.arange(18, device="cuda")], {}) > 0
    assert_untouched(before, setup.held())
    assert step.stats == stats
    step(torch.arange(18, device="cuda"))
    assert step.stats.captures == stats.captures
