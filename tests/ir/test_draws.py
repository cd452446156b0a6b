"""KeyedDraws: which number goes where, how it is distributed, what is refused.

Statistics run at a fixed seed with limits of five standard deviations.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zgcompile.errors import BadInput, CaptureRefused, StepError
from zgcompile.ir.draws import KeyedDraws
from zgcompile.keyed_numbers import bernoulli_from_bits, normal_from_bits, step_key, uniform_from_bits
from zgcompile.testing import injected_draws

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def bits(ordinal: int, size: tuple[int, ...], seed: int = 7, offset: int = 0) -> Tensor:
    return torch.ops.zgcompile.keyed_bits(torch.tensor(step_key(seed, offset)), ordinal, size)


def ordinals_of(function: Callable[[], Any]) -> int:
    with injected_draws(7) as draws:
        function()
    return draws.ordinal


def check_chi_square(observed: Any, expected: Any) -> None:
    observed, expected = np.asarray(observed, float), np.broadcast_to(np.asarray(expected, float), np.shape(observed))
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees), f"chi-square {statistic} at {degrees} degrees"


# Which numbers an op gets.

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3, 4),
    "rand_like": lambda: torch.rand_like(torch.ones(3, 4)),
    "randn": lambda: torch.randn(3, 4),
    "randn_like": lambda: torch.randn_like(torch.ones(3, 4)),
    "randint": lambda: torch.randint(9, (3, 4)),
    "randint low": lambda: torch.randint(-3, 9, (3, 4)),
    "randint_like": lambda: torch.randint_like(torch.ones(3, 4), 9),
    "randint_like low": lambda: torch.randint_like(torch.ones(3, 4), -3, 9),
    "randint_like Tensor": lambda: torch.randint_like(torch.ones(3, 4), torch.tensor(9)),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(torch.full((3, 4), 0.3)),
    "bernoulli p": lambda: torch.bernoulli(torch.ones(3, 4), 0.3),
    "bernoulli_": lambda: torch.ones(3, 4).bernoulli_(),
    "bernoulli_ Tensor": lambda: torch.ones(3, 4).bernoulli_(torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "uniform_": lambda: torch.ones(3, 4).uniform_(-2, 5),
    "normal_": lambda: torch.ones(3, 4).normal_(-2, 5),
    "normal": lambda: torch.normal(torch.ones(3, 1), torch.ones(4)),
    "normal float_Tensor": lambda: torch.normal(1.0, torch.ones(4)),
    "normal Tensor_float": lambda: torch.normal(torch.ones(4), 2.0),
    "normal size": lambda: torch.normal(1.0, 2.0, (3, 4)),
    "random_": lambda: torch.ones(3, 4).random_(),
    "random_ to": lambda: torch.ones(3, 4).random_(9),
    "random_ from": lambda: torch.ones(3, 4, dtype=torch.int32).random_(-3, 9),
    "exponential_": lambda: torch.ones(3, 4).exponential_(2.0),
    "native_dropout": lambda: torch.native_dropout(torch.ones(3, 4), 0.3, True)[0],
    "dropout": lambda: F.dropout(torch.ones(3, 4), 0.3),
    "dropout in place": lambda: F.dropout(torch.ones(3, 4), 0.3, inplace=True),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(3, 4), 0.3, True),
    "dropout1d": lambda: F.dropout1d(torch.ones(2, 3, 4), 0.3),
    "multinomial": lambda: torch.multinomial(torch.ones(3, 4), 2),
    "multinomial with": lambda: torch.multinomial(torch.ones(3, 4), 9, replacement=True),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, dropout_p=0.5),
    "lstm": lambda: torch.nn.LSTM(2, 2, 2, dropout=0.5)(torch.ones(3, 1, 2)),
}
MANY = {"lstm"}  # Parameters are initialised too.


@pytest.mark.parametrize("name", DRAWS)
def test_one_random_call_takes_one_ordinal_and_repeats(name: str) -> None:
    results = []
    for seed, advance in [(7, 0), (7, 0), (8, 0), (7, 1)]:
        with injected_draws(seed) as draws:
            draws.ordinal += advance
            results.append(DRAWS[name]())
            if name not in MANY:
                assert draws.ordinal - advance == 1
    if isinstance(results[0], tuple):
        results = [result[0] for result in results]
    assert torch.equal(results[0], results[1])
    if name not in ("dropout1d", "attention"):
        assert not torch.equal(results[0], results[2]), "the seed changes nothing"
        assert not torch.equal(results[0], results[3]), "the ordinal changes nothing"


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in MANY])
def test_keyed_results_look_like_eager_ones(name: str) -> None:
    eager = DRAWS[name]()
    with injected_draws(7):
        keyed = DRAWS[name]()
    assert (keyed.dtype, keyed.shape, keyed.stride(), keyed.device) == (
        eager.dtype,
        eager.shape,
        eager.stride(),
        eager.device,
    )


def test_numbers_are_those_of_seed_offset_ordinal_and_index() -> None:
    with injected_draws(7, 40):
        first, second = torch.rand(3, 4), torch.randn(5, dtype=torch.float64)
        third = torch.bernoulli(torch.full((6,), 0.3))
    assert torch.equal(first, uniform_from_bits(bits(0, (3, 4), offset=40), torch.float32))
    assert torch.equal(second, normal_from_bits(bits(1, (5,), offset=40), torch.float64))
    assert torch.equal(third.bool(), bernoulli_from_bits(bits(2, (6,), offset=40), 0.3))


def test_a_longer_draw_starts_with_the_shorter_one() -> None:
    def draw(rows: int) -> list[Tensor]:
        with injected_draws(7):
            x = torch.ones(rows, 3)
            return [torch.rand(rows, 3), torch.randint(5, (rows, 3)), F.dropout(x), torch.randn_like(x), x.uniform_()]

    for short, long in zip(draw(4), draw(9), strict=True):
        assert torch.equal(short, long[:4])


@pytest.mark.parametrize("rows", [0, 1, 2, 100])
def test_ordinals_do_not_depend_on_sizes(rows: int) -> None:
    def draw() -> None:
        x = torch.ones(rows, 3, requires_grad=True)
        torch.rand(rows)
        torch.randperm(rows)
        F.dropout(x, 0.3)
        torch.nn.Dropout(0.3)(x)
        torch.dropout(x, 0.3, True)
        x.detach().normal_()

    assert ordinals_of(draw) == 6


def test_calls_that_draw_nothing_take_no_ordinal() -> None:
    def draw() -> None:
        x = torch.ones(4)
        F.dropout(x, 0.3, training=False)
        for p in (0.0, 1.0):
            F.dropout(x, p)
            F.dropout(x[:0], p)
            torch.native_dropout(x, p, True)
        torch.native_dropout(x, 0.3, False)
        F.rrelu(x, training=False)
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)

    assert ordinals_of(draw) == 0


def test_each_entry_counts_from_zero() -> None:
    mode = KeyedDraws(torch.tensor(step_key(7, 0)))
    with mode:
        first = torch.rand(4)
    with mode:
        assert torch.equal(torch.rand(4), first)


def test_inference_mode_hides_no_draw() -> None:
    x = torch.ones(50)

    def draw() -> tuple[Tensor, Tensor]:
        return F.dropout(x), torch.rand(3)

    with injected_draws(7):
        expected = draw()
    with injected_draws(7), torch.inference_mode():
        got = draw()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_honoured(dtype: torch.dtype) -> None:
    with injected_draws(7):
        drawn = [torch.rand(3, dtype=dtype), torch.randn(3, dtype=dtype), torch.rand_like(torch.ones(3), dtype=dtype)]
        drawn += [torch.randint(9, (3,), dtype=dtype), torch.ones(3, dtype=dtype).exponential_()]
        drawn += [F.dropout(torch.ones(3, dtype=dtype)), torch.ones(3, dtype=dtype).normal_(2.0, 3.0)]
        assert all(tensor.dtype == dtype for tensor in drawn)
        assert torch.randperm(5, dtype=torch.int32).dtype == torch.int32


def test_default_dtype_and_device_are_honoured() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with injected_draws(7):
            assert torch.rand(3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with injected_draws(7):
        assert torch.rand(3, device="meta").device.type == "meta"


def test_in_place_ops_write_into_their_own_storage() -> None:
    x = torch.zeros(4, 6)
    view = x[1:3, ::2]
    with injected_draws(7):
        assert view.uniform_() is view
    assert torch.equal(view, uniform_from_bits(bits(0, (2, 3)), torch.float32))
    assert x[0].eq(0).all() and x[1:3, 1::2].eq(0).all()


def test_like_keeps_strides_but_numbers_go_by_logical_index() -> None:
    x = torch.ones(3, 4).t()
    with injected_draws(7):
        drawn = torch.rand_like(x)
    assert drawn.stride() == x.stride()
    assert torch.equal(drawn, uniform_from_bits(bits(0, (4, 3)), torch.float32))


@pytest.mark.parametrize("low_high", [(-2.0, 5.0), (1.0, 1.0 + 2**-23), (3.0, 3.0)])
def test_uniform_stays_in_its_range(low_high: tuple[float, float]) -> None:
    low, high = low_high
    with injected_draws(7):
        values = torch.empty(100_000).uniform_(low, high)
    assert values.min() >= low and (values.max() < high or low == high)


def test_random_ranges() -> None:
    with injected_draws(7):
        assert set(torch.empty(200, dtype=torch.bool).random_().tolist()) == {False, True}
        byte = torch.empty(20_000, dtype=torch.uint8).random_()
        assert byte.min() == 0 and byte.max() == 255
        assert torch.empty(20_000, dtype=torch.int8).random_().min() == 0
        assert torch.empty(20_000, dtype=torch.int8).random_(-128, None).min() == -128
        assert 250 < torch.empty(20_000, dtype=torch.bfloat16).random_().max() <= 256
        wide = torch.empty(2000, dtype=torch.int64).random_(-(2**63), None)
        assert (wide < 0).any() and (wide > 0).any()


# Distributions that the mode builds out of bits.


def test_randperm_is_a_uniform_permutation() -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(200):
        with injected_draws(seed):
            for _ in range(24):
                seen[tuple(torch.randperm(4).tolist())] += 1
    check_chi_square([seen[order] for order in permutations(range(4))], 200)
    with injected_draws(7):
        assert torch.randperm(1000).sort().values.equal(torch.arange(1000))
        assert torch.randperm(0).shape == (0,) and torch.randperm(1).tolist() == [0]


WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.0])


def test_multinomial_with_replacement() -> None:
    with injected_draws(7):
        drawn = torch.multinomial(torch.stack([WEIGHTS, WEIGHTS.flip(0)]), 40_000, replacement=True)
    for row, weights in zip(drawn, (WEIGHTS, WEIGHTS.flip(0)), strict=True):
        counts = torch.bincount(row, minlength=5)
        assert counts[weights == 0].sum() == 0
        positive = weights > 0
        check_chi_square(counts[positive], (weights[positive] / 8 * 40_000))


def test_multinomial_draws_each_row_anew() -> None:
    with injected_draws(7):
        for replacement in (True, False):
            first, second = torch.multinomial(torch.ones(2, 1000), 900, replacement)
            assert (first == second).sum() < 50


def test_multinomial_never_finds_weight_zero_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 4.0, 0.0], [0.0, 0.1, 0.0, 0.7, 0.0]])
    for word, category in [(0, 1), (-1, 3)]:
        monkeypatch.setattr(KeyedDraws, "bits", lambda self, size, device, word=word: torch.full(size, word))
        with injected_draws(7):
            assert (torch.multinomial(weights, 2, replacement=True) == category).all()


def test_multinomial_without_replacement_is_successive_drawing() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0])
    with injected_draws(7):
        drawn = torch.multinomial(weights.expand(60_000, 4), 2)
    pairs = Counter(map(tuple, drawn.tolist()))
    expected = {(a, b): weights[a] / 6 * weights[b] / (6 - weights[a]) for a, b in permutations(range(3), 2)}
    assert set(pairs) == set(expected)
    check_chi_square([pairs[pair] for pair in expected], [float(p) * 60_000 for p in expected.values()])


def test_weight_zero_comes_last_without_replacement() -> None:
    with injected_draws(7):
        drawn = torch.multinomial(torch.tensor([0.0, 3.0, 0.0, 1.0]).expand(500, 4), 3)
    assert all({1, 3} == set(row[:2]) for row in drawn.tolist())


def test_normal_takes_tensors_of_parameters() -> None:
    with injected_draws(7):
        drawn = torch.normal(torch.tensor([[0.0], [100.0]]), torch.tensor([1.0, 3.0]).repeat(20_000))
    assert drawn.shape == (2, 40_000)
    mean, std = drawn.view(2, -1, 2).mean(1), drawn.view(2, -1, 2).std(1)
    assert (mean - torch.tensor([[0.0], [100.0]])).abs().max() < 0.11
    assert (std - torch.tensor([1.0, 3.0])).abs().max() < 0.08


def check_draws_differ() -> None:
    with injected_draws(7) as draws:
        a, b = torch.rand(100_000), torch.rand(100_000)
        draws.key = torch.tensor(step_key(7, 4))
        draws.ordinal = 0
        c = torch.rand(100_000)
    for x, y in [(a, b), (a, c), (a[1:], a[:-1])]:
        correlation = torch.corrcoef(torch.stack([x, y]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(100_000)


def test_draws_of_a_step_and_of_steps_are_uncorrelated() -> None:
    check_draws_differ()


@pytest.mark.parametrize("frozen", ["ordinal", "key"])
def test_the_correlation_check_sees_a_frozen_part(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = KeyedDraws.bits

    def frozen_bits(self: KeyedDraws, size: Any, device: torch.device) -> Tensor:
        if frozen == "ordinal":
            self.ordinal = 0
        else:
            self.key = torch.tensor(0)
        return live(self, size, device)

    monkeypatch.setattr(KeyedDraws, "bits", frozen_bits)
    with pytest.raises(AssertionError):
        check_draws_differ()


# Dropout: a trace sees native_dropout, eager on the CPU sees bernoulli_(1 - p).


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_both_forms_of_dropout_keep_the_same_elements(p: float) -> None:
    x = torch.linspace(1, 2, 50_000, requires_grad=True)
    with injected_draws(7) as draws:
        eager = F.dropout(x, p)
        after_eager = draws.ordinal
    with injected_draws(7) as draws:
        native, mask = torch.native_dropout(x, p, True)
        assert draws.ordinal == after_eager
    assert torch.equal(eager != 0, mask) and torch.equal(native != 0, mask)
    torch.testing.assert_close(eager, native, rtol=2e-7, atol=0)
    assert abs(mask.sum() - (1 - p) * 50_000) <= 5 * math.sqrt(p * (1 - p) * 50_000)
    (gradient,) = torch.autograd.grad(eager.sum(), x)
    (native_gradient,) = torch.autograd.grad(native.sum(), x)
    assert torch.equal(gradient != 0, mask)
    torch.testing.assert_close(gradient, native_gradient, rtol=2e-7, atol=0)


def test_dropout_has_eager_semantics_for_nan() -> None:
    x = torch.full((64,), math.nan)
    with injected_draws(7):
        assert F.dropout(x).isnan().all() and torch.native_dropout(x, 0.5, True)[0].isnan().all()


def test_low_precision_dropout_keeps_its_probability() -> None:
    with injected_draws(7):
        dropped = (F.dropout(torch.ones(1_000_000, dtype=torch.bfloat16), 1e-3) == 0).sum()
    assert abs(dropped - 1000) < 5 * math.sqrt(1000)


# What is refused.


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: torch.poisson(torch.ones(2)), r"aten\.poisson\.default"),
        (lambda: torch.ones(2).geometric_(0.5), r"aten\.geometric_\.default"),
        (lambda: torch.ones(2).cauchy_(), r"aten\.cauchy_\.default"),
        (lambda: torch.ones(2).log_normal_(), r"aten\.log_normal_\.default"),
        (lambda: torch.binomial(torch.ones(2), torch.ones(2)), r"aten\.binomial\.default"),
        (lambda: torch._standard_gamma(torch.ones(2)), r"aten\._standard_gamma\.default"),
        (lambda: F.rrelu(torch.ones(2), training=True), r"aten\.rrelu_with_noise\.default"),
        (lambda: torch.rand(2, out=torch.ones(2)), r"aten\.rand\.out"),
    ],
)
def test_an_op_without_keyed_numbers_is_refused_by_name(function: Callable[[], Any], name: str) -> None:
    with injected_draws(7), pytest.raises(CaptureRefused, match=name + " has no keyed random numbers\n  instead: "):
        function()


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.rand(2, generator=g),
        lambda g: torch.randn(2, generator=g),
        lambda g: torch.randint(9, (2,), generator=g),
        lambda g: torch.randperm(2, generator=g),
        lambda g: torch.bernoulli(torch.ones(2), generator=g),
        lambda g: torch.multinomial(torch.ones(2), 1, generator=g),
        lambda g: torch.ones(2).uniform_(generator=g),
        lambda g: torch.normal(0.0, 1.0, (2,), generator=g),
    ],
)
def test_a_generator_of_its_own_is_refused(draw: Callable[[torch.Generator | None], Any]) -> None:
    with injected_draws(7) as draws:
        with pytest.raises(CaptureRefused, match=r"aten\.\w+\.\w+ with a generator"):
            draw(torch.Generator())
        draw(None)
        assert draws.ordinal == 1


def test_a_draw_in_the_backward_pass_is_refused() -> None:
    x = torch.ones(8, requires_grad=True)
    with injected_draws(7):
        loss = checkpoint(F.dropout, x, use_reentrant=False).sum()
        with pytest.raises(CaptureRefused, match="backward"):
            loss.backward()


def test_refuse_makes_the_error() -> None:
    mode = KeyedDraws(torch.tensor(0), refuse=lambda what, advice: StepError(f"{what}: {advice}"))
    with mode, pytest.raises(StepError, match=r"aten\.poisson"):
        torch.poisson(torch.ones(2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(2, dtype=torch.complex64),
        lambda: torch.rand(2, layout=torch.sparse_coo),
        lambda: torch.randint(3, 3, (2,)),
        lambda: torch.ones(2).bernoulli_(1.5),
        lambda: torch.bernoulli(torch.tensor([0.5, torch.nan])),
        lambda: torch.normal(0.0, torch.tensor([1.0, -1.0])),
        lambda: torch.multinomial(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 1),
        lambda: torch.multinomial(torch.tensor([1.0, torch.inf]), 1),
        lambda: torch.ones(2).random_(3, 2),
        lambda: torch.ones(2).uniform_(3.0, 2.0),
        lambda: torch.ones(2).exponential_(0.0),
        lambda: torch.normal(0.0, -1.0, (2,)),
    ],
)
def test_bad_arguments_are_refused(draw: Callable[[], Any]) -> None:
    with injected_draws(7), pytest.raises(BadInput):
        draw()


def test_every_random_op_of_aten_is_answered_or_refused() -> None:
    """No tagged op reaches its own kernel: each either is answered, or raises, or decomposes into such."""
    from zgcompile.ir.draws import _ANSWERS, _is_composite, _is_random

    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not any("Generator" in str(argument.type) for argument in schema.arguments):
            continue
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, schema.overload_name or "default", None)
        if not isinstance(op, torch._ops.OpOverload) or name in ("manual_seed", "initial_seed", "seed"):
            continue
        if name.startswith("_no_grad_"):  # TorchScript's own, never dispatched.
            continue
        assert op.overloadpacket in _ANSWERS or _is_composite(op) or _is_random(op), op
