"""What the protocol tests share: a sampled training step on a tiny input graph, its twin under injected draws, a forced
status.

A forced failure is real for the device: an op in the lowered FX graph sets one slot of the metadata buffer, so the
publish, the gate of every state write and the host all see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zgcompile
from zgcompile.frontend import specialisation
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.status import Check, Failure
from zgcompile.testing import injected_draws

NODES, FEATURES, CLASSES, BATCH = 60, 4, 3, 16
SLOTS = 256
FORCED: dict[str, Tensor] = {}


def forced_slots(device: torch.device) -> Tensor:
    return FORCED.setdefault(device.type, torch.zeros(SLOTS, dtype=torch.int64, device=device))


@torch.library.custom_op("zgtest::force", mutates_args=())
def force(metadata: Tensor) -> Tensor:
    return metadata | forced_slots(metadata.device)[: metadata.shape[0]]


@force.register_fake
def _(metadata: Tensor) -> Tensor:
    return torch.empty_like(metadata)


class Forced:
    """`with forced(compiled, k) as check:` check k of the step fails in the replay of the call inside."""

    def checks(self, compiled: zgcompile.CompiledStep) -> tuple[Check, ...]:
        replay = compiled.specialisations[0].replay if compiled.specialisations else None
        return () if replay is None else replay.lowered.layout.checks

    def first(self, compiled: zgcompile.CompiledStep, failure: Failure) -> int:
        return next(k for k, check in enumerate(self.checks(compiled)) if check.failure is failure)

    @contextlib.contextmanager
    def __call__(self, compiled: zgcompile.CompiledStep, k: int) -> Iterator[Check]:
        slots = forced_slots(compiled.specialisations[0].captured.device)
        slots[k] = 1
        try:
            yield self.checks(compiled)[k]
        finally:
            slots.zero_()
            drift = compiled.specialisations[0].capacities.drift
            drift.overflows.clear()  # a forced failure says nothing of the envelope
            drift.counts.clear()


@pytest.fixture(scope="session")
def forced() -> Iterator[Forced]:
    """Every step lowered from now on can be forced to fail."""
    lowered_step = specialisation.lowered_step

    def forcible(*args: Any) -> LoweredStep:
        lowered = lowered_step(*args)
        graph = lowered.fx_graph.graph
        (publish,) = [n for n in graph.nodes if n.target is torch.ops.zgcompile.publish.default]
        metadata = publish.args[0]
        with graph.inserting_after(metadata):
            seen = graph.call_function(torch.ops.zgtest.force.default, (metadata,))
        seen.meta = dict(metadata.meta)
        metadata.replace_all_uses_with(seen, delete_user_cb=lambda user: user is not seen)
        lowered.fx_graph.recompile()
        return lowered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specialisation, "lowered_step", forcible)
        yield Forced()


class Trainer:
    """A sampled step with all kinds of state. The same options give the same trainer.

    `zero`: where `zero_grad` is called: "before", "between" (forward and backward), "after" or "never". `step_inside`:
    the optimizer steps in the step, not outside of it. `light`: no neighbours and no BatchNorm, quick to capture.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        *,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        nodes: int = NODES,
        zero: str = "before",
        to_none: bool = True,
        step_inside: bool = True,
        light: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.nodes, self.device = nodes, device
        degree = torch.randint(0, 7, (nodes,), generator=generator)
        degree[:2] = 0
        indptr = torch.zeros(nodes + 1, dtype=torch.int64)
        indptr[1:] = degree.cumsum(0)
        self.indptr = indptr.to(device)
        self.indices = torch.randint(0, nodes, (int(indptr[-1]),), generator=generator).to(device)
        self.x = torch.randn(nodes, FEATURES, generator=generator, dtype=dtype).to(device)
        self.y = torch.randint(0, CLASSES, (nodes,), generator=generator).to(device)
        # No bias before a BatchNorm: its gradient is rounding noise, which Adam blows up.
        linear = nn.Linear(FEATURES if light else 2 * FEATURES, CLASSES, bias=False)
        self.model = nn.Sequential(linear, nn.Identity() if light else nn.BatchNorm1d(CLASSES), nn.Dropout(0.2)).to(
            dtype
        )
        self.embedding = nn.Parameter(torch.empty(FEATURES, dtype=dtype))
        with torch.no_grad():
            for p in (*self.model.parameters(), self.embedding):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.model.to(device)
        self.embedding.data = self.embedding.data.to(device)
        self.optimizer = optimizer([*self.model.parameters(), self.embedding], **{"lr": 0.01, **options})
        self.visits = torch.zeros(nodes, dtype=torch.int64, device=device)
        self.checksum = torch.zeros((), dtype=torch.int64, device=device)
        self.step = self._step(zero, to_none, step_inside, light)

    def sample(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(row, neighbour): each edge of the seeds with probability 0.7."""
        start = self.indptr[seeds]
        degree = self.indptr[seeds + 1] - start
        row = torch.repeat_interleave(torch.arange(seeds.numel(), device=self.device), degree)
        offset = torch.arange(row.numel(), device=self.device) - (degree.cumsum(0) - degree)[row]
        keep = torch.rand(row.numel(), device=self.device) < 0.7
        row, offset = row[keep], offset[keep]
        return row, self.indices[start[row] + offset]

    def seeds_alone(self, seeds: Tensor) -> Tensor:
        self.visits[seeds] += 1
        return self.x[seeds] * self.embedding

    def with_neighbours(self, seeds: Tensor) -> Tensor:
        row, neighbour = self.sample(seeds)
        ids, inverse = torch.unique(torch.cat([seeds, neighbour]), return_inverse=True)
        self.visits[ids] += 1
        self.checksum.add_((ids * ids).sum())
        h = (self.x * self.embedding)[ids][inverse]
        n = seeds.numel()
        pooled = torch.zeros(n, FEATURES, dtype=h.dtype, device=h.device).index_add(0, row, h[n:])
        return torch.cat([h[:n], pooled], 1)

    def _step(self, zero: str, to_none: bool, step_inside: bool, light: bool) -> Callable[[Tensor], Any]:
        def step(seeds: Tensor) -> Tensor:
            if zero == "before":
                self.optimizer.zero_grad(set_to_none=to_none)
            h = self.seeds_alone(seeds) if light else self.with_neighbours(seeds)
            loss = F.cross_entropy(self.model(h), self.y[seeds])
            if zero == "between":
                self.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            if step_inside:
                self.optimizer.step()
            if zero == "after":
                self.optimizer.zero_grad(set_to_none=to_none)
            return loss

        return step

    def batch(self, number: int, size: int = BATCH) -> Tensor:
        return torch.randperm(self.nodes, generator=torch.Generator().manual_seed(number))[:size].to(self.device)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {**dict(self.model.named_parameters()), "embedding": self.embedding}

    def tensors(self) -> dict[str, Tensor]:
        """All state but gradients, by name."""
        found: dict[str, Tensor] = {"visits": self.visits, "checksum": self.checksum, **self.parameters()}
        found |= dict(self.model.named_buffers())
        for name, p in self.parameters().items():
            found |= {f"{name}.{k}": v for k, v in self.optimizer.state[p].items() if isinstance(v, Tensor)}
        return found

    def save(self) -> dict[str, Any]:
        """A copy of all state and gradients, of the generator too."""
        kept = {k: v.detach().clone() for k, v in self.tensors().items()}
        grads = {k: None if p.grad is None else p.grad.clone() for k, p in self.parameters().items()}
        return {"tensors": kept, "grads": grads, "random": get_random(self.device)}

    def restore(self, kept: dict[str, Any]) -> None:
        """Back to what `save` gave, in place."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(kept["tensors"][name])
            for name, p in self.parameters().items():
                grad = kept["grads"][name]
                if grad is not None and p.grad is not None:
                    p.grad.copy_(grad)
                else:
                    p.grad = None if grad is None else grad.clone()
        set_random(self.device, kept["random"])


def get_random(device: str) -> Tensor:
    """The state of the default generator that a step on `device` draws from."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def set_random(device: str, state: Tensor) -> None:
    (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)


def assert_close(got: Any, want: Any, what: str, rel: float) -> None:
    """Integers exactly, floats to `rel` of the largest magnitude; None only with None."""
    if want is None or got is None:
        assert got is want, f"{what}: {got} instead of {want}"
        return
    got, want = torch.as_tensor(got).detach().cpu(), torch.as_tensor(want).detach().cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{what}: {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    )
    if not want.dtype.is_floating_point:
        assert torch.equal(got, want), f"{what}: {got} instead of {want}"
    elif want.numel():
        error = (got - want).abs().max().item()
        assert error <= rel * max(want.abs().max().item(), 1e-6), f"{what}: off by {error}: {got} instead of {want}"


def assert_same_state(got: dict[str, Any], want: dict[str, Any], rel: float, when: str = "") -> None:
    """Two results of `Trainer.save`."""
    assert got["tensors"].keys() == want["tensors"].keys(), when
    for part in ("tensors", "grads"):
        for name, value in want[part].items():
            assert_close(got[part][name], value, f"{when} {part} {name}", rel)
    assert torch.equal(got["random"], want["random"]), f"{when}: the generators differ"


# Roomy, so that no overflow but a forced one makes a step fail or a capture re-fit.
UNFORCED = {"warmup": 1, "envelope": zgcompile.Envelope(headroom=4.0)}


class Pair:
    """A compiled trainer and its eager twin: the same batches with the same numbers, compared after each call."""

    def __init__(self, build: Callable[[], Trainer], rel: float = 1e-9, **options: Any) -> None:
        self.mine, self.twin, self.rel = build(), build(), rel
        self.compiled = zgcompile.compile(self.mine.step, **{**UNFORCED, **options})
        self.calls = 0
        self.first: Any = None

    def both(self, action: Callable[[Trainer], Any]) -> None:
        action(self.mine)
        action(self.twin)

    def expect(self, batch: Tensor) -> Tensor:
        """What eager gives; the generator is back where it was."""
        state = get_random(self.mine.device)
        with injected_draws(device=self.mine.device):
            want = self.twin.step(batch)
        self.after = get_random(self.mine.device)
        set_random(self.mine.device, state)
        return want

    def call(self, batch: Tensor | None = None) -> Tensor:
        self.calls += 1
        batch = self.mine.batch(self.calls) if batch is None else batch
        want = self.expect(batch)
        got = self.compiled(batch)
        assert torch.equal(get_random(self.mine.device), self.after), "the generator is not where eager's is"
        assert_close(got, want, f"call {self.calls}, loss", self.rel)
        self.check()
        return got

    def check(self) -> None:
        assert_same_state(self.mine.save(), self.twin.save(), self.rel, f"call {self.calls},")

    def ready(self) -> Pair:
        """Warm-up is over, the step is captured and replays."""
        while self.compiled.stats.replays < 2 or self.compiled.specialisations[0].replay is None:
            self.call()
        return self

    def begin(self) -> Pair:
        """Both trainers as they were at the first `begin`, so that tests can share a capture."""
        self.both(lambda t: t.model.train())
        self.ready()
        groups = [
            {k: v for k, v in t.optimizer.param_groups[0].items() if k != "params"} for t in (self.mine, self.twin)
        ]
        if self.first is None:
            self.first = [(t.save(), group) for t, group in zip((self.mine, self.twin), groups, strict=True)]
        for trainer, (kept, group) in zip((self.mine, self.twin), self.first, strict=True):
            trainer.optimizer.param_groups[0].update(group)
            trainer.restore(kept)
        self.calls = 100
        return self


@pytest.fixture(scope="session")
def adam(forced: Forced) -> Pair:
    return Pair(Trainer)


@pytest.fixture(scope="session")
def sgd(forced: Forced) -> Pair:
    return Pair(lambda: Trainer(torch.optim.SGD, momentum=0.5))


@pytest.fixture
def pair(adam: Pair) -> Pair:
    """An Adam pair that replays. Its capture serves many tests, so counters are read before and after."""
    torch.manual_seed(7)
    return adam.begin()


@pytest.fixture
def sgd_pair(sgd: Pair) -> Pair:
    torch.manual_seed(7)
    return sgd.begin()


@pytest.fixture(scope="session")
def new_trainer() -> type[Trainer]:
    return Trainer


@pytest.fixture(scope="session")
def new_pair() -> type[Pair]:
    return Pair


@pytest.fixture(scope="session")
def same_state() -> Callable[..., None]:
    return assert_same_state


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    return assert_close


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)
