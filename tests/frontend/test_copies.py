"""Copies and pickles of compiled steps, and of what holds one."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import zgcompile

TABLE = torch.arange(120.0).view(40, 3)
SEEDS = torch.tensor([3, 17, 5])


@zgcompile.compile(warmup=1)
def double(seeds):
    return (TABLE[seeds] * 2).sum()


def triple(seeds):
    return (TABLE[seeds] * 3).sum()


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.opt = torch.optim.SGD([self.weight], lr=0.1)

    @zgcompile.compile(warmup=1)
    def step(self, seeds):
        loss = (TABLE[seeds] * self.weight).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def replayed(step):
    for _ in range(4):
        result = step(SEEDS)
    assert step.stats.replays == 3
    return result


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_a_function(again):
    step = zgcompile.compile(triple, warmup=1, envelope=zgcompile.Envelope(headroom=1.5))
    expected = replayed(step)
    other = again(step)
    assert other is not step
    assert (other.warmup, other.envelope.headroom) == (1, 1.5)
    assert other.stats.calls == 0
    assert torch.equal(replayed(other), expected)


def test_a_decorated_function_is_pickled_by_name():
    assert pickled(double) is double


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_an_object_with_a_compiled_method_trains_on_its_own(again):
    trainer = Trainer()
    replayed(trainer.step)
    other = again(trainer)
    assert torch.equal(other.weight, trainer.weight)
    kept = trainer.weight.detach().clone()
    replayed(other.step)
    assert torch.equal(trainer.weight, kept)
    for _ in range(4):
        trainer.step(SEEDS)
    torch.testing.assert_close(other.weight, trainer.weight)


def test_a_shallow_copy_trains_what_it_holds():
    trainer = Trainer()
    replayed(trainer.step)
    kept = trainer.weight.detach().clone()
    other = copy.copy(trainer)
    other._parameters = dict(other._parameters)
    other.weight = nn.Parameter(torch.full((3,), 9.0))
    other.opt = torch.optim.SGD([other.weight], lr=0.1)
    replayed(other.step)
    assert torch.equal(trainer.weight, kept)
    assert not torch.equal(other.weight, torch.full((3,), 9.0))
    replays = trainer.step.stats.replays
    trainer.step(SEEDS)
    assert trainer.step.stats.replays == replays + 1


class Louder(Trainer):
    calls = 0

    def step(self, seeds):
        type(self).calls += 1
        return super().step(seeds) * 10


def test_an_overriding_method_is_called_each_time():
    louder, plain = Louder(), Trainer()
    for _ in range(5):
        assert float(louder.step(SEEDS)) == pytest.approx(10 * float(plain.step(SEEDS)))
    assert Louder.calls == 5


class Callable:
    def __call__(self, seeds):
        return (TABLE[seeds] * 3).sum()


@pytest.mark.parametrize("fn", [functools.partial(triple), Callable()])
def test_whatever_can_be_called(fn):
    step = zgcompile.compile(fn, warmup=1)
    expected = replayed(step)
    assert torch.equal(replayed(pickled(step)), expected)
    assert torch.equal(replayed(copy.deepcopy(step)), expected)


def test_a_copy_of_a_decorated_function():
    other = pickled(copy.copy(double))
    assert other is not double
    assert other.fn is double.fn


def test_a_method_that_is_compiled_anew_is_the_one_that_runs():
    """However the memory of the former one is used again."""
    trainer = Trainer()
    for k in range(1, 40):
        Trainer.scaled = zgcompile.compile(lambda self, seeds, k=k: (TABLE[seeds] * k).sum(), warmup=1)
        assert float(trainer.scaled(SEEDS)) == k * float(TABLE[SEEDS].sum())
        del Trainer.scaled


def test_a_callable_object_keeps_its_attributes_to_itself():
    class Own:
        def __init__(self):
            self.fn, self.optimizers, self.warmup = None, ["x"], 0

        def __call__(self, seeds):
            return TABLE[seeds].sum()

    assert float(replayed(zgcompile.compile(Own(), warmup=1))) == float(TABLE[SEEDS].sum())
