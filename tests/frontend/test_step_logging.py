"""Logging in a step: named once, never with the text of a trace."""

from __future__ import annotations

import logging
import threading
import warnings
from pathlib import Path

import pytest
import torch

import zgcompile
from zgcompile.errors import CaptureWarning
from zgcompile.frontend.step_logging import silent_logging

LOGGER = logging.getLogger(__name__)
SEEDS = torch.arange(5)


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture
def kept():
    handler = Kept()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield handler.texts
    LOGGER.removeHandler(handler)


def mean_step(seeds):
    mean = seeds.unique().float().mean()
    LOGGER.info("loss %.3f", mean.item())  # HERE
    return mean


def test_the_line_is_named_and_nothing_of_the_trace_is_logged(kept):
    step = zgcompile.compile(mean_step, warmup=1)
    handle = logging.Logger.handle
    with pytest.warns(CaptureWarning, match=r"test_step_logging\.py:\d+: the step logs") as caught:
        step(SEEDS)
    assert "# HERE" in Path(__file__).read_text().splitlines()[int(str(caught[0].message).split(":")[1]) - 1]
    for _ in range(3):
        step(SEEDS)
    assert step.stats.replays == 3
    assert logging.Logger.handle is handle
    assert all(text == "loss 2.000" for text in kept)


def test_a_silent_step_warns_of_nothing_and_others_log_on(kept):
    started, traced = threading.Event(), threading.Event()

    def elsewhere():
        started.wait(10)
        LOGGER.info("from another thread")
        traced.set()

    def step(seeds):
        started.set()
        traced.wait(10)
        return seeds.unique().sum()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zgcompile.compile(step)(SEEDS)
    thread.join()
    assert kept == ["from another thread"]


def test_overlapping_traces_leave_logging_as_it_was(kept):
    inside, leave = threading.Event(), threading.Event()

    def step(seeds):
        inside.set()
        leave.wait(10)
        return seeds.unique().sum()

    handle = logging.Logger.handle
    other = threading.Thread(target=lambda: zgcompile.compile(step)(SEEDS))
    with silent_logging():
        other.start()
        inside.wait(10)
    leave.set()
    other.join()
    assert logging.Logger.handle is handle
    LOGGER.info("after")
    assert kept == ["after"]


def test_a_logger_with_a_name_like_torchs_is_the_users():
    metrics = logging.getLogger("torchmetrics.mine")

    def step(seeds):
        mean = seeds.unique().float().mean()
        metrics.warning("%.3f", mean.item())
        return mean

    with pytest.warns(CaptureWarning, match="the step logs"):
        zgcompile.compile(step)(SEEDS)
