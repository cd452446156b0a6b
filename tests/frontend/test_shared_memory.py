"""Tensors over one memory that meet at the call: what the step writes through one is seen through the other, as in
eager."""

from __future__ import annotations

import threading

import pytest
import torch

import zgcompile
from zgcompile.errors import CaptureRefused, CaptureWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*shares memory")


def parameters():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    features = torch.randn(60, 6)

    def step(ids, weight):
        opt.zero_grad()
        loss = model(features[ids]).square().mean()
        loss.backward()
        opt.step()
        return weight.square().sum()

    return step, model.weight.detach()


def table():
    written = torch.zeros(60, 6)

    def step(ids, t):
        written[ids] += 1
        return t.sum().view(1)

    return step, written


def rows_of_a_table():
    step, written = table()
    return step, written[2:7]


@pytest.mark.parametrize("world", [parameters, table, rows_of_a_table])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_an_argument_over_state_that_the_step_writes(world, first):
    """From call `first` on, which is one of the warm-up or a replay."""

    def run(compiled):
        step, alias = world()
        fn = zgcompile.compile(step, warmup=2) if compiled else step
        return [fn(torch.arange(9), alias if i >= first else alias.clone()) for i in range(8)], fn

    got, fn = run(True)
    for a, b in zip(got, run(False)[0], strict=True):
        torch.testing.assert_close(a, b.detach())
    assert fn.stats.preconditions >= 8 - max(first, 1)


def test_it_is_said():
    step, alias = table()
    with pytest.warns(CaptureWarning, match="shares memory with state"):
        zgcompile.compile(step, warmup=1)(torch.arange(9), alias)


def test_another_part_of_the_memory_is_no_matter():
    whole = torch.zeros(60, 6)
    written = whole[:30]

    def step(ids, t):
        written[ids] += 1
        return t.sum().view(1)

    fn = zgcompile.compile(step, warmup=1)
    for _ in range(4):
        assert fn(torch.arange(9), whole[30:]).item() == 0
    assert fn.stats.replays == 3


def test_state_that_is_tied_after_the_capture():
    written, read = torch.zeros(6), torch.ones(6)

    def step(ids):
        written.add_(1)
        return read.sum() + ids.sum()

    fn = zgcompile.compile(step, warmup=1)
    for _ in range(4):
        fn(torch.arange(3))
    read.data = written
    with pytest.raises(CaptureRefused, match="share memory"):
        fn(torch.arange(3))
    assert written.tolist() == [4.0] * 6


def test_threads_take_turns():
    count = torch.zeros(())

    def step(ids):
        count.add_(1)
        return ids.sum()

    fn = zgcompile.compile(step, warmup=1)
    wrong = []

    def work(k):
        for i in range(40):
            ids = torch.full((5 + k,), 100 * k + i)
            if int(fn(ids)) != int(ids.sum()):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert count == fn.stats.calls == 120
