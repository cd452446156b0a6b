"""A batch with a wrong id: wherever it runs (the first call, at exact sizes, as a replay, in the user's own function),
an error with the line, nothing changed, and a process that can still use its GPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zgcompile
from zgcompile.backend import checked_indices
from zgcompile.errors import StepError

ROWS = 50


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(ROWS, 4, device=device))
        self.opt = torch.optim.Adam([self.table], lr=0.1)
        self.visits = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def step(self, seeds):
        self.opt.zero_grad()
        rows = self.table[seeds].squeeze()  # one row: another step than the traced one
        self.visits[seeds] += 1
        loss = rows.pow(2).mean()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def state(self):
        moments = [v for s in self.opt.state.values() for v in s.values()]
        return [t.detach().clone() for t in (self.table, self.visits, *moments)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_wrong_id_in_any_call(device):
    every_call(device)


def test_nothing_wrong_reaches_a_kernel(monkeypatch):
    """On the CPU, with what a GPU does in place of an exception: the kernel asserts, and nothing more can be run."""
    monkeypatch.setattr(checked_indices, "faults", lambda device: True)
    with AssertingKernels() as kernels:
        every_call("cpu")
    assert kernels.met > 50 and not kernels.dead


class AssertingKernels(TorchDispatchMode):
    """Under every other mode, as kernels are."""

    def __init__(self):
        super().__init__()
        self.met, self.dead = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not self.dead, f"the device is gone since {self.dead}"
        real = not any(isinstance(t, FakeTensor) for t in tree_leaves((args, kwargs)))
        if real and checked_indices._functional(func) in checked_indices.CHECKED:
            self.met += 1
            wrong = checked_indices.CHECKED[checked_indices._functional(func)](*args, **(kwargs or {}))
            if any(w.any() for w in wrong):
                self.dead = str(func)
                raise AssertionError(f"device-side assert in {func}")
        return func(*args, **(kwargs or {}))


def every_call(device):
    def seeds(*ids):
        return torch.tensor(ids, device=device)

    def random_state():
        return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()

    trainer, twin = Trainer(device), Trainer(device)
    step = zgcompile.compile(trainer.step, warmup=2, envelope=zgcompile.Envelope(headroom=1.0))
    ways = [
        seeds(3, 4, ROWS),  # the first call
        seeds(3, ROWS + 7),  # at exact sizes
        seeds(-ROWS - 1, 1),
        seeds(3, ROWS, 5),  # a replay
        seeds(ROWS),  # a replay that fails a precondition too
        seeds(*range(9), ROWS),  # more than its buffers hold
    ]
    good = [seeds(1, 2, 3), seeds(4, 5), seeds(6, 7, 8), seeds(9, 10, 11), seeds(12), seeds(13, 14, 15), seeds(16, 17)]
    for wrong, right in zip(ways, good, strict=False):
        before, random = trainer.state(), random_state()
        with pytest.raises(StepError, match=r"test_bad_batches\.py:\d+.*out of (range|bounds)"):
            step(wrong)
        if device == "cuda":
            torch.cuda.synchronize()
        after = trainer.state()
        assert len(before) == len(after) and all(map(torch.equal, before, after))
        assert torch.equal(random, random_state())
        torch.testing.assert_close(step(right), twin.step(right))
    step(good[-1]), twin.step(good[-1])
    for got, want in zip(trainer.state(), twin.state(), strict=True):
        torch.testing.assert_close(got, want)
    assert step.stats.replays >= 2
