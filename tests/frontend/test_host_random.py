"""The host's generators: which ones advanced, and back."""

from __future__ import annotations

import random

import numpy as np
import torch

from zgcompile.frontend.python_state import HostRandom, PythonSnapshot


def test_host_random_names_and_restores():
    taken = HostRandom.take()
    assert taken.changed() == []
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())
    first = draw()
    assert taken.changed() == ["random", "numpy.random", "torch"]
    taken.restore()
    assert taken.changed() == []
    assert draw() == first
    taken.restore()
    np.random.rand()
    assert taken.changed() == ["numpy.random"]
    taken.restore()


def test_host_random_under_a_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    gen = torch.Generator().manual_seed(0)
    snapshot = PythonSnapshot.take(lambda: gen)
    with FakeTensorMode():
        taken = HostRandom.take()
        assert taken.changed() == []
        assert snapshot.diff() == []
        taken.restore()
        snapshot.restore()
    assert type(taken.states["torch"]) is torch.Tensor
