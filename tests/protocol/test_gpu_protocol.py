"""The protocol on a GPU: forced failures, staging under a stalled stream, the early status, the early return."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgcompile
from zgcompile.errors import StepError
from zgcompile.kernels import native
from zgcompile.testing import injected_draws

pytestmark = pytest.mark.gpu
STALL = 100_000_000  # cycles: some 50 ms


@pytest.fixture(autouse=True)
def _seeded_device() -> None:
    torch.cuda.manual_seed(7)


@pytest.fixture(scope="module")
def gpu(forced, new_pair, new_trainer):
    """A pair on the GPU; its capture serves the tests of this file."""
    torch.cuda.manual_seed(7)
    return new_pair(
        lambda: new_trainer(torch.optim.SGD, device="cuda", dtype=torch.float32, momentum=0.5), rel=1e-4
    ).ready()


def test_five_hundred_steps_with_one_in_twenty_failing(gpu, forced):
    """Integers exactly over the whole run, floats from the same state in each step."""
    pair, choose, turn = gpu, random.Random(4), 0
    first = pair.compiled.stats
    for number in range(500):
        batch = pair.mine.batch(500 + number, choose.choice((16, 16, 16, 5)))
        checks = forced.checks(pair.compiled)
        pair.twin.restore(pair.mine.save())
        if not checks or choose.random() >= 0.05:
            pair.call(batch)
            continue
        k, turn = turn % len(checks), turn + 1
        with forced(pair.compiled, k):
            pair.call(batch)
    stats = pair.compiled.stats
    assert (
        turn >= len(forced.checks(pair.compiled))
        and stats.overflows > first.overflows
        and stats.preconditions > first.preconditions
    )
    assert stats.replays + stats.eager_runs == stats.calls
    assert stats.traces == first.traces


def test_a_user_error_and_then_a_step(gpu, same_state):
    bad = gpu.mine.batch(1)
    bad[2] = gpu.mine.nodes + 3
    before = gpu.mine.save()
    with pytest.raises(StepError, match=r"conftest.py:\d+"):
        gpu.compiled(bad)
    same_state(gpu.mine.save(), before, 0.0)
    gpu.twin.restore(gpu.mine.save())
    gpu.call()


def test_a_checkpoint_of_an_eager_run_on_the_gpu(forced, new_pair, new_trainer):
    """Eager Adam counts on the host, a compiled step on the device: state goes over both ways."""
    pair = new_pair(lambda: new_trainer(device="cuda", light=True))
    pair.ready()
    assert pair.mine.optimizer.state[pair.mine.embedding]["step"].device.type == "cuda"
    eager = new_trainer(device="cuda", light=True)
    for number in range(3):
        batch = eager.batch(number)
        with injected_draws(number, device="cuda"):
            eager.step(batch)
    assert eager.optimizer.state[eager.embedding]["step"].device.type == "cpu"
    pair.both(lambda t: t.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict())))
    traces = pair.compiled.stats.traces
    for number in range(3):
        batch = pair.mine.batch(20 + number)
        with_state = pair.expect(batch)
        got = pair.compiled(batch)
        assert got.item() == pytest.approx(with_state.item(), rel=1e-6)
    assert pair.compiled.stats.traces == traces
    eager.optimizer.load_state_dict(copy.deepcopy(pair.mine.optimizer.state_dict()))
    batch = eager.batch(4)
    with injected_draws(4, device="cuda"):
        eager.step(batch)


def test_each_step_sees_its_own_inputs_under_a_stalled_stream():
    """A call reads its own seeds, lengths, key and hyperparameters, however late the device is behind the host."""
    weight = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    table = torch.arange(1000, device="cuda") * 3

    def step(seeds: Tensor) -> tuple[Any, ...]:
        optimizer.zero_grad()
        (weight.sum() * seeds.numel()).backward()
        optimizer.step()
        return table[seeds], torch.rand(seeds.numel(), device="cuda"), seeds.sum().item(), weight + 0

    compiled = zgcompile.compile(step, warmup=1)
    for _ in range(3):
        compiled(torch.arange(32, device="cuda"))
    batches = [torch.randperm(1000, device="cuda")[: 32 - 3 * i] for i in range(8)]
    start = weight.detach().clone()
    torch.cuda.manual_seed(3)
    draws = []
    for batch in batches:
        with injected_draws(device="cuda"):
            draws.append(torch.rand(batch.numel(), device="cuda"))
    torch.cuda.manual_seed(3)
    torch.cuda.synchronize()
    got = []
    for number, batch in enumerate(batches):
        torch.cuda._sleep(STALL)
        optimizer.param_groups[0]["lr"] = 0.5 / (number + 1)
        got.append(compiled(batch))
        if number % 2:
            torch.cuda._sleep(STALL)  # behind the status, in front of the next call's copies
    assert compiled.stats.captures == 1
    total = start
    for number, (batch, draw, (rows, drawn, summed, after)) in enumerate(zip(batches, draws, got, strict=True)):
        assert torch.equal(rows, batch * 3)
        assert torch.equal(drawn, draw)
        assert summed == int(batch.sum())
        total = total - 0.5 / (number + 1) * batch.numel()
        torch.testing.assert_close(after, total)


class Deep:
    """A step whose model part is long: wide layers behind a little sampling."""

    def __init__(self, trainer: Any, width: int = 4096) -> None:
        self.trainer = trainer
        layers = [
            nn.Linear(8, width),
            nn.ReLU(),
            *[m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())],
            nn.Linear(width, 3),
        ]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, seeds: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        h = self.trainer.with_neighbours(seeds)
        loss = nn.functional.cross_entropy(self.model(h), self.trainer.y[seeds])
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.fixture(scope="module")
def deep(new_trainer):
    trainer = new_trainer(torch.optim.SGD, device="cuda", dtype=torch.float32, nodes=4000)
    compiled = zgcompile.compile(Deep(trainer).step, warmup=1)
    batches = [trainer.batch(i, 1024) for i in range(6)]
    for batch in batches[:4]:
        compiled(batch)
    torch.cuda.synchronize()
    return compiled, batches


def test_the_status_is_published_while_the_model_part_is_ahead(deep):
    """Inductor orders independent kernels as it likes, so a GEMM or two may come first; most of the model may not."""
    compiled, batches = deep
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        compiled(batches[4])
        torch.cuda.synchronize()
    kernels = sorted((e for e in profiled.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    names = [k.name for k in kernels]
    publish = next(i for i, name in enumerate(names) if "publish" in name)
    gemms = [i for i, name in enumerate(names) if re.search(r"gemm|cutlass|xmma|cublas|triton.*_mm", name)]
    assert gemms and publish < gemms[len(gemms) // 2], names
    assert len(names) - publish > 10, names


@pytest.mark.skipif(native() is None, reason="without the native module a call waits for its step")
def test_a_call_returns_before_its_step_has_ended(deep):
    compiled, batches = deep
    stream = torch.cuda.current_stream()
    early = 0
    for batch in batches[:5]:
        torch.cuda.synchronize()
        compiled(batch)
        early += not stream.query()
    assert early == 5
