"""A replay runs no hook of a tensor: such a step is refused, also when the hook comes after the capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgcompile
from zgcompile.errors import CaptureRefused

FEAT = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def built():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seeds):
        optimizer.zero_grad()
        loss = model(FEAT[seeds]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, zgcompile.compile(step, warmup=1)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_before_the_first_call(register):
    model, step = built()
    getattr(model.weight, register)(lambda g: None)
    before = model.weight.detach().clone()
    with pytest.raises(CaptureRefused, match="gradient hook"):
        step(torch.arange(5))
    assert torch.equal(model.weight, before)


def test_a_hook_after_the_capture():
    model, step = built()
    for _ in range(4):
        step(torch.arange(5))
    before = model.weight.detach().clone()
    handle = model.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureRefused, match="gradient hook"):
        step(torch.arange(5))
    assert torch.equal(model.weight, before)
    handle.remove()
    step(torch.arange(5))
    assert not torch.equal(model.weight, before)
