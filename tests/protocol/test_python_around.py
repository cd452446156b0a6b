"""What scripts do between steps: schedulers, direct writes, checkpoints, modes, rebinding, kept numbers, interrupts."""

from __future__ import annotations

import copy
import gc
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zgcompile
from zgcompile.backend.deferred import DeferredNumber
from zgcompile.backend.replay import Launch
from zgcompile.errors import CaptureWarning
from zgcompile.frontend import specialisation
from zgcompile.testing import injected_draws

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


@pytest.fixture(params=["adam", "sgd"])
def either(request):
    return request.getfixturevalue("pair" if request.param == "adam" else "sgd_pair")


def counts(pair: Any) -> tuple[int, int]:
    return pair.compiled.stats.traces, pair.compiled.stats.captures


def test_every_scheduler_is_listed():
    listed = {
        n for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, lr_scheduler.LRScheduler)
    }
    assert listed - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers(either, name):
    """Five steps equal to eager; nothing is traced or captured anew, PyTorch does not warn of the order of calls."""
    either.call()  # a capture that an earlier test made due
    before = counts(either)
    rates, made = [], {}
    either.both(lambda t: made.update({id(t): SCHEDULERS[name](t.optimizer)}))
    for _ in range(5):
        loss = either.call()
        rates.append(tuple(v for v in map(either.mine.optimizer.param_groups[0].get, ("lr", "momentum", "betas"))))
        metric = [float(loss)] if name == "ReduceLROnPlateau" else []
        either.both(lambda t, metric=metric: made[id(t)].step(*metric))
    assert len(set(rates)) > 1, "the scheduler changed nothing"
    assert counts(either) == before


def test_direct_writes_of_hyperparameters(pair):
    before = counts(pair)
    for change in ({"lr": 0.5}, {"lr": 0.0}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"lr": 1e-3, "betas": (0.0, 0.5)}):
        pair.both(lambda t, change=change: t.optimizer.param_groups[0].update(change))
        pair.call()
    pair.both(lambda t: t.optimizer.param_groups[0].update(lr=1))  # an int
    pair.call()
    assert counts(pair) == before


def test_direct_writes_of_momentum_and_weight_decay(forced, new_pair, new_trainer):
    def build() -> Any:
        return new_trainer(torch.optim.SGD, momentum=0.5, weight_decay=0.01, light=True)

    pair = new_pair(build).ready()
    before = counts(pair)
    for change in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.1, "weight_decay": 0.3, "lr": 0.2}):
        pair.both(lambda t, change=change: t.optimizer.param_groups[0].update(change))
        pair.call()
        pair.call()
    assert counts(pair) == before
    pair.both(lambda t: t.optimizer.param_groups[0].update(weight_decay=0.0))  # another FX graph
    pair.call()
    pair.call()


def test_checkpoints_both_ways(pair, new_trainer, same_state):
    """Out of a compiled run into an eager one, and back into the compiled one."""
    before = counts(pair)
    for _ in range(2):
        pair.call()
    eager = new_trainer()
    copy_state(pair.mine, eager)
    assert type(pair.mine.optimizer.state_dict()["param_groups"][0]["lr"]) is float
    for number in range(3):
        batch = pair.mine.batch(200 + number)
        state = torch.get_rng_state()
        with injected_draws():
            eager.step(batch)
        torch.set_rng_state(state)
        pair.call(batch)
    same_state(pair.mine.save(), eager.save(), 1e-9)
    for _ in range(3):  # eager alone goes on
        batch = pair.mine.batch(300)
        with injected_draws():
            eager.step(batch)
    pair.both(lambda t: copy_state(eager, t))
    for _ in range(3):
        pair.call()
    assert pair.compiled.stats.traces == before[0]


def copy_state(source: Any, target: Any) -> None:
    """As a checkpoint does it."""
    target.model.load_state_dict({k: v.clone() for k, v in source.model.state_dict().items()})
    with torch.no_grad():
        for name in ("embedding", "visits", "checksum"):
            getattr(target, name).copy_(getattr(source, name))
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))


def test_a_checkpoint_into_a_step_that_was_compiled_in_mid_training(forced, new_pair, new_trainer):
    """State that exists at the capture is found where it is held: `load_state_dict` puts new tensors there."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD, momentum=0.9, light=True))
    batch = pair.mine.batch(50)
    for trainer in (pair.mine, pair.twin):
        with injected_draws(1):
            trainer.step(batch)
    pair.ready()
    kept = copy.deepcopy(pair.mine.optimizer.state_dict())
    for _ in range(3):
        pair.call()
    traces = pair.compiled.stats.traces
    pair.both(lambda t: t.optimizer.load_state_dict(copy.deepcopy(kept)))
    for _ in range(3):
        pair.call()
    assert pair.compiled.stats.traces == traces


def test_train_and_eval(sgd_pair):
    """Each mode is a capture of its own, used again when its turn comes."""
    for mode in (False, True, False, True, True, False, True):
        sgd_pair.both(lambda t, mode=mode: t.model.train(mode))
        sgd_pair.call()
    traces, captures = counts(sgd_pair)
    for mode in (False, True, False, True):
        sgd_pair.both(lambda t, mode=mode: t.model.train(mode))
        sgd_pair.call()
        sgd_pair.call()
    assert counts(sgd_pair) == (traces, captures)


def test_parameters_replaced(forced, new_pair, new_trainer):
    """`p.data = ...`, a new Parameter, the same in the optimizer: the next call uses what is there, as eager does."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD, light=True)).ready()
    traces = pair.compiled.stats.traces

    def new_data(t: Any) -> None:
        t.model[0].weight.data = torch.full_like(t.model[0].weight, 0.1)

    def new_parameter(t: Any) -> None:
        t.model[0].weight = nn.Parameter(torch.full_like(t.model[0].weight, 0.2))

    def new_group(t: Any) -> None:
        t.optimizer.param_groups[0]["params"][:] = t.parameters().values()

    for change in (new_data, new_parameter, new_group):
        pair.both(change)
        for _ in range(3):
            pair.call()
        if change is new_data:
            assert pair.compiled.stats.traces == traces
    assert pair.mine.model[0].weight.grad is not None


def test_a_rebound_input_tensor(forced, new_pair, new_trainer):
    """A feature table that the user replaces by another one, and one that he writes in place."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD, light=True)).ready()
    pair.both(lambda t: setattr(t, "x", t.x * 2 + 1))
    for _ in range(2):
        pair.call()
    pair.both(lambda t: t.x.mul_(0.5))  # in place: no new capture
    before = counts(pair)
    pair.call()
    assert counts(pair) == before


def test_two_compiled_steps_interleaved(pair, sgd_pair):
    before = counts(pair), counts(sgd_pair)
    for number in range(8):
        pair.call()
        sgd_pair.call(sgd_pair.mine.batch(number, 16 - number))
    assert (counts(pair), counts(sgd_pair)) == before


def test_fifty_losses_are_fifty_tensors(pair):
    losses, values = [], []
    for number in range(50):
        losses.append(pair.compiled(pair.mine.batch(number, 16 - number % 3)))
        values.append(losses[-1].item())
    assert [x.item() for x in losses] == values and len(set(values)) == 50
    assert len({x.data_ptr() for x in losses}) == 50
    assert not any(x.requires_grad for x in losses)


# -- deferred numbers


@pytest.fixture(scope="module")
def reading() -> Any:
    """A replaying step that returns float(mean), an int item and a tensor."""
    weights = torch.arange(10, dtype=torch.float64) / 4

    def step(ids):
        chosen = weights[ids]
        return float(chosen.mean()), ids.max().item(), chosen.sum()

    compiled = zgcompile.compile(step, warmup=1)
    for _ in range(3):
        compiled(torch.tensor([0, 1, 2]))
    return compiled


@pytest.fixture
def numbers(reading) -> tuple[Any, Any]:
    mean, most, _ = reading(torch.tensor([1, 2, 4]))
    assert isinstance(mean, DeferredNumber) and isinstance(most, DeferredNumber)
    return mean, most


MEAN = 1.75 / 3


@pytest.mark.parametrize(
    "read",
    [
        float,
        int,
        bool,
        round,
        math.sqrt,
        math.floor,
        math.ceil,
        hash,
        str,
        repr,
        abs,
        np.float64,
        lambda v: np.asarray(v).tolist(),
        lambda v: np.array([v, v], dtype=np.float64).tolist(),
        lambda v: round(v, 3),
        lambda v: f"{v:.4f}",
        lambda v: f"{v}",
        lambda v: "%.3f" % v,
        lambda v: json.dumps(float(v)),
        lambda v: (v + 1, 1 + v, v - 1, 1 - v, v * 2, 2 * v, v / 2, 2 / v, v // 0.1, v % 0.1, v**2, 2**v, -v, +v),
        lambda v: (v == v, v < 1, v > 1, v <= 1, v >= 1, v != 2, v in (1, v), v == v + 0),
        lambda v: (sum([v, v]), max(v, 0), min([v, 3]), sorted([v, 0.1, 2])),
        lambda v: ({v: 1}[v + 0], len({v, v + 0})),
        lambda v: torch.tensor([float(v)]).tolist(),
    ],
)
def test_deferred_numbers_read_as_the_number(numbers, read):
    for number, value in zip(numbers, (MEAN, 4), strict=True):
        assert read(number) == read(value)
        assert type(read(number)) is type(read(value))


def test_deferred_numbers_in_json_statistics_and_sequences(numbers):
    mean, most = numbers
    assert json.loads(json.dumps({"loss": mean, "most": most}, default=float)) == {"loss": MEAN, "most": 4.0}
    assert list(range(most)) == [0, 1, 2, 3] and "abcdef"[most] == "e"
    with pytest.raises(TypeError):
        "abc"[mean]
    assert math.isclose(mean, MEAN) and np.mean([mean, mean]) == MEAN
    assert torch.zeros(most).shape == (4,)


def test_deferred_numbers_wait_only_when_read(reading):
    before = reading.stats.deferred_reads
    held = [reading(torch.tensor([i, i + 1])) for i in range(5)]
    assert reading.stats.deferred_reads == before
    assert [float(mean) for mean, _, _ in held] == [(2 * i + 1) / 8 for i in range(5)]  # not the last one's, five times
    assert [float(mean) for mean, _, _ in held] == [(2 * i + 1) / 8 for i in range(5)]
    assert reading.stats.deferred_reads == before + 5
    assert [int(most) for _, most, _ in held] == [1, 2, 3, 4, 5]


# -- what goes wrong


@pytest.mark.parametrize("place", ["run", "results", "hand_out_gradients", "run_at_exact_sizes"])
def test_an_interrupt_leaves_a_consistent_state(pair, forced, place, monkeypatch, same_state):
    """Ctrl-C before anything was launched, or in the overflow re-run: as if never called. Behind the replay: the step
    has happened. The next call is right either way."""
    subject = pair.compiled.specialisations[0]
    pair.call()
    before = pair.mine.save()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subject.replay if place == "run" else subject, place, interrupt)
        if place == "run_at_exact_sizes":
            with forced(pair.compiled, 0), pytest.raises(KeyboardInterrupt):
                pair.compiled(pair.mine.batch(1))
        else:
            with pytest.raises(KeyboardInterrupt):
                pair.compiled(pair.mine.batch(1))
    now = pair.mine.save()
    if place in ("run", "run_at_exact_sizes"):
        same_state(now, before, 0.0)
    else:
        pair.twin.restore(before)
        batch = pair.mine.batch(1)
        with injected_draws():
            pair.twin.step(batch)
        now["grads"] = pair.twin.save()["grads"]  # handed out last
        same_state(now, pair.twin.save(), 1e-9)
    pair.call()
    pair.call()


def test_fifty_failing_captures(new_pair, new_trainer, same_state, monkeypatch):
    """Each call raises, changes nothing and keeps nothing; then it works."""
    pair = new_pair(lambda: new_trainer(torch.optim.SGD, light=True))
    pair.call()
    before, batch, objects = pair.mine.save(), pair.mine.batch(2), 0
    with monkeypatch.context() as patch:
        patch.setattr(specialisation, "lowered_step", _once(specialisation.lowered_step))
        patch.setattr(specialisation, "ReferenceReplay", _no_memory)
        for number in range(50):
            with pytest.raises(RuntimeError, match="no memory"):
                pair.compiled(batch)
            if number == 9:
                gc.collect()
                objects = _tensors()
        gc.collect()
        assert _tensors() <= objects
    same_state(pair.mine.save(), before, 0.0)
    assert len(pair.compiled.specialisations) == 1 and pair.compiled.stats.calls == 1
    pair.call()
    pair.call()
    assert pair.compiled.stats.replays == 2


def _once(lowered_step: Any) -> Any:
    """Fifty lowerings would take long."""
    made: list[Any] = []
    return lambda *args: made[0] if made else made.append(lowered_step(*args)) or made[0]


def _no_memory(*_: Any) -> Any:
    raise RuntimeError("no memory")


def _tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_a_cuda_graph_that_cannot_be_captured_is_a_warning(pair, monkeypatch):
    """The step goes on op by op. What a GPU does is shown by a class that fails, as if this were its device."""
    subject = pair.compiled.specialisations[0]
    monkeypatch.setattr(specialisation, "CudaGraphReplay", _no_memory)
    monkeypatch.setattr(subject.captured, "device", torch.device("cuda"))
    with pytest.warns(CaptureWarning, match=r"conftest.py:\d+: the step could not be captured.*no memory"):
        replay = subject._captured_replay(subject.replay.lowered, subject.guards.lifted, Launch(0, [], [], []))
    monkeypatch.undo()
    assert isinstance(replay, specialisation.ReferenceReplay)
    pair.call()


def test_a_failed_capture_on_moved_state_leaves_a_usable_step(pair, same_state, monkeypatch):
    pair.both(move_parameters)
    before, batch, replays = pair.mine.save(), pair.mine.batch(2), pair.compiled.stats.replays
    with monkeypatch.context() as patch:
        patch.setattr(specialisation.ReferenceReplay, "rebind", _no_memory)
        with pytest.raises(RuntimeError, match="no memory"):
            pair.compiled(batch)
    same_state(pair.mine.save(), before, 0.0)
    assert pair.compiled.specialisations[0].replay is None
    pair.call()
    assert pair.compiled.stats.replays == replays + 1


def move_parameters(trainer):
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()
