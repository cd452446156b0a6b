"""Copies and pickles of compiled steps, and of what holds one."""

from __future__ import annotations

import copy
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
