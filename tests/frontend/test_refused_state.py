"""Python state and host random numbers that a replay would freeze are refused at the first call, with nothing
changed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.frontend.refused import Refused, check_case
from zgcompile.errors import CaptureRefused, PythonStateChanged

COUNT = 0
SEEN: dict[str, int] = {}
refused = Refused()


@refused(PythonStateChanged)
def a_counter_attribute(w):
    def step(seeds):
        w.n += 1  # HERE
        w.train(w.loss(seeds))

    return step


@refused(PythonStateChanged)
def a_list_append(w):
    losses: list[Any] = []

    def step(seeds):
        loss = w.loss(seeds)
        w.train(loss)
        losses.append(loss)  # HERE

    return step


@refused(PythonStateChanged)
def a_dict_write(w):
    history = {"n": 0}

    def step(seeds):
        w.train(w.loss(seeds))
        history["n"] = history["n"] + 1  # HERE

    return step


@refused(PythonStateChanged)
def a_new_dict_key(w):
    cache: dict[str, Any] = {}

    def step(seeds):
        loss = w.loss(seeds)
        cache["loss"] = loss.detach()  # HERE
        w.train(loss)

    return step


@refused(PythonStateChanged)
def a_global_counter(w):
    def step(seeds):
        global COUNT
        COUNT += 1  # HERE
        w.train(w.loss(seeds))

    return step


@refused(PythonStateChanged)
def a_global_dict(w):
    def step(seeds):
        SEEN["steps"] = 1  # HERE
        w.train(w.loss(seeds))

    return step


@refused(PythonStateChanged)
def a_nonlocal_counter(w):
    count = 0

    def step(seeds):
        nonlocal count
        count += 1  # HERE
        w.train(w.loss(seeds))

    return step


@refused(PythonStateChanged)
def a_rebound_memory(w):
    w.memory = torch.zeros(40)

    def step(seeds):
        w.train(w.loss(seeds))
        w.memory = w.memory * 0.9  # HERE

    return step


@refused(PythonStateChanged)
def a_rebound_buffer(w):
    w.model.register_buffer("memory", torch.zeros(3))

    def step(seeds):
        w.train(w.loss(seeds))
        w.model.memory = w.model.memory + 1  # HERE

    return step


@refused(PythonStateChanged)
def a_new_attribute(w):
    def step(seeds):
        loss = w.loss(seeds)
        w.last = loss.detach()  # HERE
        w.train(loss)

    return step


@refused(PythonStateChanged)
def the_lr_inside(w):
    def step(seeds):
        w.train(w.loss(seeds))
        w.opt.param_groups[0]["lr"] = w.opt.param_groups[0]["lr"] * 0.9  # HERE

    return step


@refused(PythonStateChanged)
def a_scheduler_inside(w):
    scheduler = torch.optim.lr_scheduler.StepLR(w.opt, 10)

    def step(seeds):
        w.train(w.loss(seeds))
        scheduler.step()  # HERE

    return step


@refused(CaptureRefused)
def a_print(w):
    def step(seeds):
        loss = w.loss(seeds)
        print(loss)  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def python_random(w):
    def step(seeds):
        loss = w.loss(seeds) * random.random()  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def numpy_random(w):
    def step(seeds):
        loss = w.loss(seeds) * float(np.random.rand())  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def numpy_generator(w):
    rng = np.random.default_rng(0)

    def step(seeds):
        loss = w.loss(seeds) * float(rng.random())  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def an_iterator(w):
    scales = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])

    def step(seeds):
        loss = w.loss(seeds) * next(scales)  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def a_python_generator(w):
    scales = (float(i) for i in range(100))

    def step(seeds):
        loss = w.loss(seeds) * next(scales)  # HERE
        w.train(loss)

    return step


@refused(CaptureRefused)
def a_generator_of_torch(w):
    generator = torch.Generator().manual_seed(0)

    def step(seeds):
        noise = torch.rand(seeds.numel(), 5, generator=generator)  # HERE
        w.train(w.loss(seeds) + noise.sum() * 0)

    return step


@refused(CaptureRefused)
def a_seed_inside(w):
    def step(seeds):
        torch.manual_seed(0)  # HERE
        w.train(w.loss(seeds) + torch.rand(()))

    return step


@refused(CaptureRefused)
def numbers_that_vary(w):
    clock = random.Random(0)

    def step(seeds):
        scale = torch.tensor([clock.random(), 2.0])  # HERE
        w.train(w.loss(seeds) * scale.sum())

    return step


@refused(CaptureRefused)
def a_python_clock(w):
    import time

    def step(seeds):
        w.train(w.loss(seeds) * time.perf_counter())  # HERE

    return step


@refused(CaptureRefused)
def a_returned_time(w):
    import time

    def step(seeds):  # HERE
        start = time.perf_counter()
        w.train(w.loss(seeds))
        return time.perf_counter() - start

    return step


@pytest.mark.parametrize("name", refused)
def test_refused(name, new_world, check_refused, batches_of):
    check_case(refused, name, new_world, check_refused, batches_of)
