"""Modes around the call and hooks on every module decide about the ops of a step: another one is another capture."""

from __future__ import annotations

import contextlib

import pytest
import torch

import zgcompile


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def tripled(module, inputs, out):
    return out * 3


@contextlib.contextmanager
def global_hook():
    handle = torch.nn.modules.module.register_module_forward_hook(tripled)
    try:
        yield
    finally:
        handle.remove()


AROUND = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "default dtype": default_dtype,
    "global hook": global_hook,
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("inside_first", [False, True])
def test_a_mode_around_the_call(name, inside_first):
    torch.manual_seed(0)
    model, features = torch.nn.Linear(4, 2), torch.randn(20, 4)

    def step(ids):
        out = model(features[ids])
        return out.detach(), torch.ones(()) * torch.is_grad_enabled(), torch.zeros(2)

    fn = zgcompile.compile(step, warmup=1)
    for inside in [inside_first] * 4 + [not inside_first] * 4 + [inside_first, not inside_first]:
        ids = torch.randint(20, (7,))
        with AROUND[name]() if inside else contextlib.nullcontext():
            for got, want in zip(fn(ids), step(ids), strict=True):
                assert got.dtype == want.dtype
                torch.testing.assert_close(got, want)
    assert fn.stats.traces == 2
    assert fn.stats.replays == 8


def test_a_training_step_under_no_grad_raises_as_eager_does():
    weight = torch.nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        opt.zero_grad()
        (x * weight).sum().backward()
        opt.step()

    fn = zgcompile.compile(step, warmup=1)
    for _ in range(4):
        fn(torch.ones(5, 3))
    before = weight.detach().clone()
    with torch.no_grad(), pytest.raises(Exception, match="does not require grad"):
        fn(torch.ones(5, 3))
    assert torch.equal(weight, before)
