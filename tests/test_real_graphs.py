"""Cora and Citeseer: the compiled step trains as the untouched eager script does.

The files are not part of the project: ZGCOMPILE_DATA names their folder, else ../shared/data beside the checkout is
looked at.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import statistics
import sys
from pathlib import Path

import pytest
import torch

import zgcompile
from zgcompile.testing import injected_draws

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("ZGCOMPILE_DATA", ROOT.parent / "shared" / "data"))
STEPS, BATCH, WARMUP = 200, 32, 3

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data files in {DATA}")


def example(name):
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sage():
    return example("sage_torch")


@pytest.fixture(params=["cora", "citeseer"])
def data_file(request):
    return str(DATA / f"{request.param}.npz")


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # bit-equal sums
    yield
    torch.set_num_threads(threads)


def arguments(sage, data_file, fanout, dropout):
    return sage.arguments([f"--data={data_file}", f"--fanout={fanout}", f"--dropout={dropout}", "--hidden=16"])


def built(sage, args, permute=False):
    _, model, opt, data = sage.build(args)
    data = dataclasses.replace(data, feat=data.feat.to(torch.get_default_dtype()))
    if permute:
        data = dataclasses.replace(data, indices=permuted_rows(data.indptr, data.indices))
    return sage.make_step(model, opt, data, args.fanouts), model, opt, data


def permuted_rows(indptr, indices):
    """The same neighbours of every node, in another order."""
    generator = torch.Generator().manual_seed(99)
    out = indices.clone()
    for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
        out[a:b] = indices[a:b][torch.randperm(b - a, generator=generator)]
    return out


def batches(data, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    while len(found) < steps:
        order = data.train[torch.randperm(data.train.numel(), generator=generator)]
        found += order.split(BATCH)  # the last one of an epoch is partial
    return found[:steps]


def state(model, opt):
    tensors = [p.detach() for p in model.parameters()]
    return tensors + [v for p in model.parameters() for _, v in sorted(opt.state[p].items())]


def distance(a, b):
    return max(
        (x.double() - y.double()).norm().item() / max(y.double().norm().item(), 1e-12)
        for x, y in zip(a, b, strict=True)
    )


def assert_replayed(step, calls):
    stats = step.stats
    assert stats.calls == calls
    assert stats.replays >= 0.95 * (calls - WARMUP), stats
    assert stats.traces == 1


def train(step, seeds):
    for batch in seeds:
        step(batch)


def test_full_fanout_in_float64_equals_the_eager_script(sage, data_file, double):
    args = arguments(sage, data_file, "-1,-1", 0)
    eager, model, opt, data = built(sage, args)
    fn, twin, twin_opt, _ = built(sage, args)
    step = zgcompile.compile(fn, warmup=WARMUP)
    seeds = batches(data, STEPS)
    train(eager, seeds)
    train(step, seeds)
    assert distance(state(twin, twin_opt), state(model, opt)) < 1e-9
    assert_replayed(step, STEPS)


def test_full_fanout_in_float32_is_as_close_as_a_reordering_of_edges(sage, data_file):
    args = arguments(sage, data_file, "-1,-1", 0)
    eager, model, opt, data = built(sage, args)
    reordered, other, other_opt, _ = built(sage, args, permute=True)
    fn, twin, twin_opt, _ = built(sage, args)
    step = zgcompile.compile(fn, warmup=WARMUP)
    seeds = batches(data, STEPS)
    for run in (eager, reordered, step):
        train(run, seeds)
    between_eager = distance(state(other, other_opt), state(model, opt))
    assert between_eager > 0
    assert distance(state(twin, twin_opt), state(model, opt)) <= 3 * between_eager
    assert_replayed(step, STEPS)


def test_losses_under_injected_draws_equal_eagers(sage, data_file, double):
    args = arguments(sage, data_file, "10,5", 0.5)
    eager, _, _, data = built(sage, args)
    fn, _, _, _ = built(sage, args)
    step = zgcompile.compile(fn, warmup=WARMUP)
    seeds = batches(data, STEPS)
    torch.manual_seed(5)
    expected = []
    for batch in seeds:
        with injected_draws():
            expected.append(eager(batch).item())
    torch.manual_seed(5)
    losses = [step(batch).item() for batch in seeds]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_replayed(step, STEPS)


class Restarted:
    """One step, trained anew from other initial parameters each time: the capture is kept."""

    def __init__(self, sage, args, compiled):
        fn, self.model, self.opt, self.data = built(sage, args)
        self.step = zgcompile.compile(fn, warmup=WARMUP) if compiled else fn
        self.sage, self.layers = sage, args.layers

    def accuracy(self, seed, steps):
        torch.manual_seed(seed)
        fresh = copy.deepcopy(self.model)
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.model.load_state_dict(fresh.state_dict())
        for entry in self.opt.state.values():
            for tensor in entry.values():
                tensor.zero_()
        torch.manual_seed(1000 + seed)
        train(self.step, batches(self.data, steps, seed))
        return self.sage.accuracy(self.model, self.data, self.data.test, self.layers)


def paired_accuracies(sage, data_file, seeds, steps):
    args = arguments(sage, data_file, "10,5", 0.5)
    compiled, stock = Restarted(sage, args, True), Restarted(sage, args, False)
    pairs = [(compiled.accuracy(s, steps), stock.accuracy(s, steps)) for s in seeds]
    assert_replayed(compiled.step, len(seeds) * steps)
    return pairs


def assert_same_mean(pairs):
    differences = [a - b for a, b in pairs]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.mean(differences)) < 2 * error + 1e-3, (statistics.mean(differences), error)
    assert statistics.mean(a for a, _ in pairs) > 0.55  # it learned: chance is at most 0.3


@pytest.mark.slow
def test_accuracy_against_stock_eager_over_paired_seeds(sage, data_file):
    """Six times twenty: of samples of twenty seeds one in twenty is beyond two standard errors with nothing wrong. (The
    range was fixed before it was first run: seeds 0 to 19 of Citeseer had been such a sample, by +1.0 % +- 0.3 %.)"""
    pairs = paired_accuracies(sage, data_file, seeds=range(1000, 1120), steps=100)
    differences = [a - b for a, b in pairs]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.mean(differences)) < 2 * error
    assert_same_mean(pairs)


def test_accuracy_against_stock_eager_over_four_seeds(sage):
    assert_same_mean(paired_accuracies(sage, str(DATA / "cora.npz"), seeds=range(4), steps=60))
