"""`.data =` on parameters, gradients and tables, inside the step and between calls, and Python that looks at p.grad."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import zgcompile
from zgcompile.errors import CaptureRefused
from zgcompile.testing import injected_draws

X = torch.arange(60, dtype=torch.float64).view(20, 3) / 60
BATCHES = [torch.arange(4) + i % 3 for i in range(4)] + [torch.arange(2 + i % 5) + i for i in range(8)]


class World:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).double()
        self.other = copy.deepcopy(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def loss(self, seeds):
        return (self.model(X[seeds]) + self.other(X[seeds])).pow(2).mean()

    def state(self):
        found = [p.detach().clone() for p in (*self.model.parameters(), *self.other.parameters())]
        return found + [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def by_hand(w):
    def step(seeds):
        w.model.zero_grad()
        loss = w.loss(seeds)
        loss.backward()
        for p in w.model.parameters():
            p.data = p.data - 0.1 * p.grad
        return loss.detach()

    return step


def momentum_copy(w):
    def step(seeds):
        w.opt.zero_grad()
        loss = w.loss(seeds)
        loss.backward()
        w.opt.step()
        for k, q in zip(w.other.parameters(), w.model.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1
        return loss.detach()

    return step


def halved_gradient(w):
    def step(seeds):
        w.opt.zero_grad()
        loss = w.loss(seeds)
        loss.backward()
        for p in w.model.parameters():
            p.grad.data = p.grad.data * 0.5
        w.opt.step()
        return loss.detach()

    return step


def looked_at(w):
    def step(seeds):
        had = w.model.weight.grad is not None
        w.model.zero_grad()
        loss = w.loss(seeds) * (10 if had else 1)
        loss.backward()
        return loss.detach()

    return step


def plain(w):
    def step(seeds):
        w.opt.zero_grad()
        loss = w.loss(seeds)
        loss.backward()
        w.opt.step()
        return loss.detach()

    return step


def backward_only(w):
    def step(seeds):
        loss = w.loss(seeds)
        loss.backward()
        return loss.detach()

    return step


def halve_between(w, i):
    for p in w.model.parameters():
        p.grad.data = p.grad.data * 0.5


def halve_and_step_between(w, i):
    halve_between(w, i)
    w.opt.step()
    w.opt.zero_grad()


def drop_now_and_then(w, i):
    if i % 3 == 2:
        w.model.zero_grad()


def nothing(w, i):
    pass


@pytest.mark.parametrize(
    ("build", "between"),
    [
        (by_hand, nothing), (momentum_copy, nothing), (halved_gradient, nothing), (looked_at, nothing),
        (looked_at, drop_now_and_then), (plain, halve_between), (backward_only, halve_and_step_between),
    ],
)  # fmt: skip
def test_trains_as_eager_does(build, between):
    eager, compiled = World(), World()
    step = zgcompile.compile(build(compiled), warmup=1)
    untouched = build(eager)
    for i, batch in enumerate(BATCHES):
        with injected_draws():
            expected = untouched(batch)
        torch.testing.assert_close(step(batch), expected, rtol=1e-9, atol=1e-12)
        for got, want in zip(compiled.state(), eager.state(), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        between(eager, i)
        between(compiled, i)
    assert step.stats.replays >= len(BATCHES) // 2


def other_shape(w, hidden):
    w.model.bias.data = torch.zeros(2, dtype=torch.float64)


def a_view(w, hidden):
    hidden[0].data = torch.zeros(1, dtype=torch.float64)


def computed(w, hidden):
    hidden.data = hidden.data * 0


def shared(w, hidden):
    w.other.weight.data = w.model.weight.data


@pytest.mark.parametrize(
    ("assign", "what"),
    [
        (other_shape, "gives a tensor of"),
        (a_view, "gives a view"),
        (computed, "replaces a value"),
        (shared, "lets two tensors share"),
    ],
)
def test_what_a_write_of_the_values_is_not(assign, what):
    w = World()

    def step(seeds):
        hidden = w.model(X[seeds]).relu()
        assign(w, hidden)
        w.opt.zero_grad()
        hidden.sum().backward()
        w.opt.step()
        return hidden.detach().sum()

    before = w.state()
    with pytest.raises(CaptureRefused, match=f"data =` {what}") as caught:
        zgcompile.compile(step)(BATCHES[0])
    assert "x.copy_(y)" in caught.value.advice and "test_data_assignment.py" in str(caught.value)
    for now, then in zip(w.state(), before, strict=True):
        assert now is then is None or torch.equal(now, then)


def test_data_that_the_backward_pass_needs_is_no_silent_error():
    """Eager's gradient is that of the old weight, which a write of the values would lose."""
    w = World()

    def step(seeds):
        hidden = (X[seeds].requires_grad_() @ w.model.weight.t()).sum()
        w.model.weight.data = w.model.weight.data * 0
        w.opt.zero_grad()
        hidden.backward()
        return hidden.detach()

    with pytest.raises(CaptureRefused, match="modified by an inplace operation"):
        zgcompile.compile(step)(BATCHES[0])
    assert w.model.weight.grad is None and w.model.weight.detach().any()


def test_text_that_goes_nowhere_is_allowed():
    w = World()

    def step(seeds):
        n = seeds.unique().numel()
        with torch.profiler.record_function(f"gather {n}"):
            rows = X[seeds]
        logging.getLogger(__name__).debug(f"{n} nodes, {rows.shape}")
        return rows.sum() + w.model.weight.detach().sum()

    compiled = zgcompile.compile(step, warmup=1)
    for batch in BATCHES:
        assert compiled(batch) == step(batch)
    assert compiled.stats.replays
