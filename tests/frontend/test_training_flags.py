"""`model.train()` inside the step, `model.eval()` outside it or in another step; numpy values that the step reads."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import zgcompile
from zgcompile.testing import injected_draws

X = torch.arange(120, dtype=torch.float64).view(40, 3) / 120
BATCHES = [torch.arange(2 + i % 4) + i for i in range(24)]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()


def steps(net):
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)

    def train_step(seeds):
        net.train()
        opt.zero_grad()
        loss = net(X[seeds]).pow(2).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    def evaluate(seeds):
        net.eval()
        with torch.no_grad():
            return net(X[seeds]).sum()

    return train_step, evaluate


@pytest.mark.parametrize("compile_evaluate", [False, True])
def test_epochs_with_validation_train_as_eager_does(compile_evaluate):
    net = model()
    twin = copy.deepcopy(net)
    eager_train, eager_evaluate = steps(net)
    train, evaluate = steps(twin)
    train = zgcompile.compile(train, warmup=1)
    if compile_evaluate:
        evaluate = zgcompile.compile(evaluate, warmup=1)
    for i, batch in enumerate(BATCHES):
        torch.manual_seed(i)
        with injected_draws():
            expected = eager_train(batch)
        torch.manual_seed(i)
        torch.testing.assert_close(train(batch), expected, rtol=1e-8, atol=1e-12)
        assert all(m.training for m in twin.modules())
        if i % 4 == 3:
            torch.testing.assert_close(evaluate(batch), eager_evaluate(batch), rtol=1e-8, atol=1e-12)
            assert not any(m.training for m in twin.modules())
    for p, q in zip(twin.state_dict().values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-10)
    assert train.stats.replays >= len(BATCHES) // 2


def test_verify_leaves_the_flags_as_they_are():
    net = model()
    train, _ = steps(net)
    net.eval()
    net[1].train()
    before = [m.training for m in net.modules()]
    zgcompile.verify(train, BATCHES[2])
    assert [m.training for m in net.modules()] == before


def test_another_change_beside_the_flag_is_still_refused():
    net = model()

    def step(seeds):
        net.train()
        net.calls = getattr(net, "calls", 0) + 1
        return net(X[seeds]).sum().detach()

    net.eval()
    with pytest.raises(zgcompile.errors.PythonStateChanged, match="calls"):
        zgcompile.compile(step)(BATCHES[2])
    assert not net.training


def test_a_numpy_value_that_the_step_reads_is_a_guard():
    scale = np.array([1.0, 2.0])

    def step(seeds):
        return X[seeds].sum() * float(scale[0])

    compiled = zgcompile.compile(step, warmup=1)
    for i, batch in enumerate(BATCHES):
        if i in (6, 12):
            scale[0] = i
        torch.testing.assert_close(compiled(batch), step(batch))
    assert compiled.stats.replays >= len(BATCHES) // 2
