"""Keyed draws of a traced step, and where a step's (seed, offset) come from."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zgcompile.errors import BadInput
from zgcompile.ir.draws import DrawStream, KeyedDraws
from zgcompile.keyed_numbers import bernoulli_from_bits, step_key
from zgcompile.testing import injected_draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


# Tracing, as the compiler does it.


@contextmanager
def tracing() -> Iterator[FakeTensorMode]:
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake, enable_python_dispatcher():
        yield fake


def trace(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    def keyed(key: Tensor, *inputs: Tensor) -> Any:
        with KeyedDraws(key):
            return function(*inputs)

    with tracing() as fake:
        fakes = [fake.from_tensor(tensor, static_shapes=True) for tensor in (torch.tensor(0), *inputs)]
        return make_fx(keyed, tracing_mode="real")(*fakes)


def step(x: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    chosen = x[mask]
    noisy = F.dropout(chosen, 0.5) * torch.rand(chosen.shape[0], 1)
    order = torch.randperm(chosen.shape[0])
    picks = torch.randint(0, chosen.shape[0], (6,))
    coins = torch.empty_like(chosen).bernoulli_(0.25) + torch.bernoulli(weights)[0]
    sampled = torch.multinomial(weights, 3) + torch.multinomial(weights, 3, replacement=True)
    gumbel = F.gumbel_softmax(noisy, tau=0.5)
    (gradient,) = torch.autograd.grad((noisy * gumbel).sum(), x)
    return (
        noisy[order],
        picks,
        coins,
        sampled,
        gumbel,
        gradient,
        torch.randn_like(chosen),
        chosen.detach().clone().random_(9),
    )


def test_a_traced_step_draws_what_eager_draws() -> None:
    x = torch.randn(40, 5, requires_grad=True)
    weights = torch.rand(8)
    fx_graph = trace(step, x, torch.rand(40) < 0.5, weights)
    targets = [node.target for node in fx_graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.zgcompile.keyed_bits.default in targets
    for target in targets:
        assert not (isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags)
    for seed, offset, share in [(1, 0, 0.5), (2, 4, 0.2), (2, 8, 0.9)]:
        mask = torch.rand(40) < share
        with injected_draws(seed, offset):
            expected = step(x, mask, weights)
        got = fx_graph(torch.tensor(step_key(seed, offset)), x, mask, weights)
        for name, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(a, b), name


def test_ordinals_agree_after_an_empty_selection() -> None:
    def dropped(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x[mask], 0.5), torch.rand(4)

    x = torch.ones(10, 3)
    fx_graph = trace(dropped, x, torch.ones(10, dtype=torch.bool))
    nothing = torch.zeros(10, dtype=torch.bool)
    with injected_draws(3):
        expected = dropped(x, nothing)
    assert torch.equal(fx_graph(torch.tensor(step_key(3, 0)), x, nothing)[1], expected[1])


def test_scalars_that_only_the_device_knows() -> None:
    def draw(n: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        rows, probability = n.item(), p.item()
        torch._check(rows >= 0)
        # No ATen schema takes a symbolic probability, so the conversion is called as it stands.
        coins = bernoulli_from_bits(torch.randint(-(2**63), 2**63 - 1, (50,)), probability)
        picks = torch.randint(0, rows, (5,)), torch.randint(-rows, rows, (5,))
        chosen = torch.multinomial(torch.ones(40), rows)
        return *picks, torch.randperm(rows), coins, torch.rand(rows, 2), chosen

    fx_graph = trace(draw, torch.tensor(5), torch.tensor(0.25, dtype=torch.float64))
    for rows, p in [(9, 0.25), (30, 0.5)]:
        arguments = torch.tensor(rows), torch.tensor(p, dtype=torch.float64)
        with injected_draws(5):
            expected = draw(*arguments)
        for a, b in zip(fx_graph(torch.tensor(step_key(5, 0)), *arguments), expected, strict=True):
            assert torch.equal(a, b)


# Where seed and offset come from.


def test_take_follows_the_default_generator() -> None:
    stream = DrawStream()
    torch.manual_seed(5)
    taken = [stream.take(CPU) for _ in range(4)]
    assert [seed for seed, _ in taken] == [5] * 4 and len(set(taken)) == 4
    torch.manual_seed(5)
    assert [stream.take(CPU) for _ in range(4)] == taken
    torch.manual_seed(5)
    stream.take(CPU)
    state = torch.get_rng_state()
    assert [stream.take(CPU) for _ in range(3)] == taken[1:]
    torch.set_rng_state(state)
    assert [DrawStream().take(CPU) for _ in range(3)] == taken[1:]


def test_peek_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    peeked = DrawStream().peek(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert DrawStream().take(CPU) == peeked
    assert not torch.equal(torch.get_rng_state(), state)


def test_take_is_deaf_to_modes() -> None:
    peeked = DrawStream().peek(CPU)
    with injected_draws(7) as draws, FakeTensorMode():
        assert DrawStream().take(CPU) == peeked and draws.ordinal == 0


class FakeCudaGenerator:
    def __init__(self) -> None:
        self.offset = 8

    def initial_seed(self) -> int:
        return 2**64 - 3

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_cuda_advances_its_offset_by_four(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [FakeCudaGenerator(), FakeCudaGenerator()]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    stream, cuda = DrawStream(), torch.device("cuda")
    assert stream.peek(cuda) == stream.take(cuda) == (2**64 - 3, 8)
    assert stream.take(torch.device("cuda", 1)) == (2**64 - 3, 12)
    assert [generator.offset for generator in generators] == [8, 16]


def test_injected_draws_take_the_next_of_the_generator() -> None:
    torch.manual_seed(11)
    seed, offset = DrawStream().peek(CPU)
    with injected_draws():
        first = torch.rand(4)
    with injected_draws():
        second = torch.rand(4)
    after = torch.get_rng_state()
    with injected_draws(seed, offset):
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), after), "an explicit seed touches no generator"
    assert not torch.equal(first, second)
    torch.manual_seed(11)
    DrawStream().take(CPU), DrawStream().take(CPU)
    assert torch.equal(torch.get_rng_state(), after), "the draws inside move no generator"


def test_an_offset_needs_a_seed() -> None:
    with pytest.raises(BadInput, match="seed"), injected_draws(offset=4):
        pass


def test_the_mode_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), injected_draws(7):
        _ = 1 / 0
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)
    F.dropout(torch.ones(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_numbers_of_the_cpu() -> None:
    def draw(device: str) -> list[Tensor]:
        x = torch.ones(1000, 7, device=device)
        return [
            torch.rand(1000, device=device),
            torch.randint(9, (4, 5), device=device),
            torch.randperm(99, device=device),
            F.dropout(x, 0.5),
        ]

    for key_device in ("cpu", "cuda"):
        with injected_draws(7, device=key_device):
            on_cpu = draw("cpu")
        with injected_draws(7, device=key_device):
            on_gpu = draw("cuda")
        for a, b in zip(on_cpu, on_gpu, strict=True):
            assert b.is_cuda and torch.equal(a, b.cpu())
