"""Undo puts back what a step of modules and optimizers that only hooks can find has changed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import zgcompile
from zgcompile.errors import VerificationFailed
from zgcompile.frontend import undo
from zgcompile.frontend.undo import Undo, same_bits


def train_step():
    """Names none of the objects below."""


def test_everything_is_back_as_often_as_asked():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = grad = torch.ones(2, 2)
    numbers, table = [1], torch.arange(3.0)
    model.numbers = numbers
    kept = Undo(train_step, [model, optimizer], [*model.parameters(), table], [model.weight])
    values, versions = [p.detach().clone() for p in model.parameters()], [p._version for p in model.parameters()]
    rng, draw = torch.get_rng_state(), random.getstate()
    for _ in range(2):
        model.bias.grad, model.weight.grad = torch.ones(2), torch.full((2, 2), 2.0)
        grad.zero_()
        optimizer.step()
        table.add_(1)
        numbers.append(2)
        model.extra = 5
        torch.rand(1)
        random.random()
        assert {id(t) for t, _ in kept.changed()} == {id(t) for t in (*model.parameters(), table, grad)}
        kept.restore()
        assert kept.changed() == []
        assert all(map(torch.equal, model.parameters(), values))
        assert [p._version for p in model.parameters()] == versions
        assert model.weight.grad is grad
        assert grad.tolist() == [[1, 1], [1, 1]]
        assert model.bias.grad is None
        assert table.tolist() == [0, 1, 2]
        assert not optimizer.state
        assert model.numbers is numbers
        assert numbers == [1]
        assert not hasattr(model, "extra")
        assert torch.equal(torch.get_rng_state(), rng)
        assert random.getstate() == draw


class Member:
    kept = (1,)

    def method(self):
        """Is replaced."""


@zgcompile.compile
def compiled():
    """Names nothing."""


def rebinding_step():
    global max
    max = min
    rebinding_step.seen = compiled.seen = 1
    rebinding_step.__defaults__ = (1,)
    Member.fresh, Member.kept, Member.method = 1, (), len
    Member.__call__ = len
    return Member, compiled


def test_names_and_members_that_were_not_there_are_gone_again():
    kept = Undo(rebinding_step, [], [], [])
    before, of_the_step, own = dict(vars(Member)), dict(vars(compiled)), Member.kept
    rebinding_step()
    paths = {change.path for change in kept.snapshot.diff()}
    assert {"global max", "rebinding_step.seen", "compiled.seen", "Member.fresh", "Member.__call__"} <= paths
    kept.restore()
    assert kept.snapshot.diff() == []
    assert kept.snapshot.check() is None
    assert "max" not in globals()
    assert rebinding_step.__defaults__ is None
    assert vars(rebinding_step) == {}
    assert dict(vars(Member)) == before
    assert Member.kept is own
    assert dict(vars(compiled)) == of_the_step


def test_a_large_tensor_is_watched_and_not_copied(monkeypatch):
    monkeypatch.setattr(undo, "LARGE", 8)
    table, other = torch.zeros(4), torch.zeros(2)
    kept = Undo(train_step, [], [table, other], [])
    other.add_(1)
    kept.restore()
    assert other.tolist() == [0, 0]
    table.add_(1)
    with pytest.raises(VerificationFailed, match=r"writes a tensor of shape \(4,\)"):
        kept.restore()


def test_a_write_that_leaves_the_version_alone_is_undone_where_it_is_known():
    """A CUDA Graph writes so."""
    written = torch.zeros(3)
    kept = Undo(train_step, [], [], [written])
    written.data.add_(1)
    kept.restore()
    assert written.tolist() == [0, 0, 0]


def test_nan_is_the_same_as_nan():
    a = torch.tensor([float("nan"), 1.0, float("inf")])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([float("nan"), 1.0, -float("inf")]))
    assert not same_bits(a, torch.tensor([1.0, 1.0, float("inf")]))
