"""zgcompile::keyed_bits and the distributions made of its bits, against an independent uint64 program and chi-squares.

Every statistic runs at fixed keys, so that it passes or fails for good; limits are five standard deviations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zgcompile import keyed_numbers
from zgcompile.errors import BadInput
from zgcompile.kernels import keyed_draw
from zgcompile.keyed_numbers import (
    bernoulli_from_bits,
    dimension_stride,
    exponential_from_bits,
    integers_from_bits,
    keyed_bits_reference,
    normal_from_bits,
    step_key,
    uniform_from_bits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = step_key(20260529, 12)
U64 = np.uint64
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def keyed_bits(size: tuple[int, ...], key: int = KEY, ordinal: int = 3) -> Tensor:
    return torch.ops.zgcompile.keyed_bits(torch.tensor(key), ordinal, size)


def splitmix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


@np.errstate(over="ignore")
def numpy_bits(seed: int, offset: int, ordinal: int, size: tuple[int, ...]) -> np.ndarray:
    golden = U64(0x9E3779B97F4A7C15)
    key = splitmix64(splitmix64(np.array([seed], U64) + golden) + np.array([offset], U64) * golden)
    z = np.broadcast_to(splitmix64(key + U64(ordinal + 1) * golden)[0], size)
    for dimension, index in enumerate(np.indices(size)):
        z = z + index.astype(U64) * (splitmix64(np.array(U64(dimension + 1) * golden)) | U64(1))
    return splitmix64(z)


def check_chi_square(observed: np.ndarray, expected: np.ndarray | float) -> None:
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees), f"chi-square {statistic} at {degrees} degrees"


def check_independent(a: Tensor, b: Tensor) -> None:
    """Each of the 4096 pairs of a bit of `a` and a bit of `b` agrees half of the time; so do pairs of top nibbles."""
    ones = torch.stack([torch.stack([(word >> bit) & 1 for bit in range(64)]) for word in (a, b)]).double() * 2 - 1
    agreement = ones[0] @ ones[1].T / math.sqrt(a.numel())
    assert agreement.abs().max() < 6, f"two bits agree {agreement.abs().max()} standard deviations too often"
    joint = torch.bincount(((a >> 60) & 15) * 16 + ((b >> 60) & 15), minlength=256).numpy()
    check_chi_square(joint, a.numel() / 256)


@pytest.mark.parametrize("size", [(), (1,), (1000,), (7, 0), (33, 5), (3, 4, 5), (2, 3, 2, 2, 3)])
@pytest.mark.parametrize(("seed", "offset", "ordinal"), [(0, 0, 0), (1, 4, 0), (2**64 - 1, 2**63 - 1, 2**20)])
def test_bits_are_those_of_an_independent_uint64_program(
    size: tuple[int, ...], seed: int, offset: int, ordinal: int
) -> None:
    got = keyed_bits(size, step_key(seed, offset), ordinal)
    assert got.dtype == torch.int64 and got.shape == size
    assert (got.numpy().view(U64) == numpy_bits(seed, offset, ordinal, size)).all()


def test_step_key_fits_int64_and_differs_for_neighbours() -> None:
    keys = [step_key(seed, offset) for seed in range(100) for offset in range(0, 400, 4)]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    assert step_key(-1, 0) == step_key(2**64 - 1, 0)


def test_strides_are_odd_and_distinct() -> None:
    strides = [dimension_stride(dimension) for dimension in range(64)]
    assert all(stride % 2 for stride in strides) and len(set(strides)) == 64


@pytest.mark.parametrize("dimension", range(4))
def test_padding_any_dimension_changes_no_logical_number(dimension: int) -> None:
    size = (3, 4, 2, 5)
    padded = tuple(length + 3 * (axis == dimension) for axis, length in enumerate(size))
    assert torch.equal(keyed_bits(padded).narrow(dimension, 0, size[dimension]), keyed_bits(size))


def test_no_two_numbers_of_a_step_are_equal() -> None:
    numbers = torch.cat([keyed_bits((400, 300), ordinal=ordinal).flatten() for ordinal in range(3)])
    assert numbers.unique().numel() == numbers.numel()


def check_neighbours_independent() -> None:
    here = keyed_bits((200_000,))
    check_independent(here[:-1], here[1:])
    check_independent(here, keyed_bits((200_000,), ordinal=4))
    check_independent(here, keyed_bits((200_000,), key=KEY + 1))
    check_independent(here, keyed_bits((200_000,), key=step_key(20260529, 16)))
    check_independent(here, keyed_bits((200_000,), key=step_key(20260530, 12)))
    matrix = keyed_bits((450, 450))
    check_independent(matrix[1:].flatten(), matrix[:-1].flatten())
    check_independent(matrix[:, 1:].flatten(), matrix[:, :-1].flatten())


def test_neighbouring_indices_ordinals_and_keys_are_independent() -> None:
    check_neighbours_independent()


@pytest.mark.parametrize("frozen", ["key", "ordinal", "finaliser"])
def test_the_independence_check_sees_a_frozen_part(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if frozen == "finaliser":
        monkeypatch.setattr(keyed_numbers, "_finalise", lambda z: z)
    else:
        kept = keyed_bits_reference

        def frozen_reference(key: Tensor, ordinal: int, size: tuple[int, ...]) -> Tensor:
            return kept(torch.zeros_like(key), ordinal, size) if frozen == "key" else kept(key, 0, size)

        monkeypatch.setattr(keyed_draw, "keyed_bits_reference", frozen_reference)
    with pytest.raises(AssertionError):
        check_neighbours_independent()


@pytest.mark.parametrize("size", [(), (5,), (4, 0, 3)])
def test_opcheck(size: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.zgcompile.keyed_bits.default, (torch.tensor(KEY), 3, size))


def test_fake_takes_a_size_that_only_the_device_knows() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint()
        bits = torch.ops.zgcompile.keyed_bits(torch.zeros((), dtype=torch.int64), 0, [rows, 4])
        assert bits.shape[0] is rows or bits.shape[0].node.expr == rows.node.expr
        assert bits.dtype == torch.int64


def test_reference_traces_into_int64_aten() -> None:
    fx_graph = make_fx(lambda key: keyed_bits_reference(key, 3, (6, 5)), tracing_mode="fake")(torch.tensor(0))
    calls = [node for node in fx_graph.graph.nodes if node.op == "call_function"]
    assert all(node.meta["val"].dtype == torch.int64 for node in calls)
    assert not any(torch.Tag.nondeterministic_seeded in node.target.tags for node in calls)
    assert torch.equal(fx_graph(torch.tensor(KEY)), keyed_bits((6, 5)))


@pytest.mark.parametrize("key", [torch.zeros(1, dtype=torch.int64), torch.zeros(())])
def test_a_bad_key_is_refused(key: Tensor) -> None:
    with pytest.raises(BadInput, match="0-d int64"):
        torch.ops.zgcompile.keyed_bits(key, 0, [2])


EXTREMES = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 0xFFFFFF, -(2**40), 1 << 40, -(2**24), 2**24 - 1])
BITS = torch.ops.zgcompile.keyed_bits(torch.tensor(KEY), 0, [400_000])


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_is_flat_and_below_one(dtype: torch.dtype) -> None:
    values = uniform_from_bits(torch.cat([EXTREMES, BITS]), dtype)
    assert values.dtype == dtype and values.min() >= 0 and values.max() < 1
    check_chi_square(np.histogram(values[len(EXTREMES) :].double(), 64, (0, 1))[0], len(BITS) / 64)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)]
)
def test_uniform_resolves_its_last_bit(dtype: torch.dtype, bits: int) -> None:
    scaled = uniform_from_bits(BITS, dtype).double() * 2.0**bits
    assert torch.equal(scaled, scaled.floor())
    check_chi_square(np.bincount(scaled.long().numpy() & 1), len(BITS) / 2)


def test_float64_uniforms_are_all_different() -> None:
    assert uniform_from_bits(BITS, torch.float64).unique().numel() == len(BITS)


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_is_finite_and_normal(dtype: torch.dtype) -> None:
    assert normal_from_bits(EXTREMES, dtype).isfinite().all()
    values = normal_from_bits(BITS, dtype).double()
    edges = np.array([-np.inf, *np.linspace(-3.5 + 1 / 256, 3.5 + 1 / 256, 29), np.inf])
    # Half precision rounds to values beside an edge; float32's rounding is far below the limit.
    if dtype in (torch.float64, torch.float32):
        check_chi_square(np.histogram(values, edges)[0], np.diff(normal_cdf(edges)) * len(BITS))
    standard_error = 1 / math.sqrt(len(BITS))
    assert abs(values.mean()) < 5 * standard_error
    assert abs(values.square().mean() - 1) < 5 * math.sqrt(2) * standard_error
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96) * standard_error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_has_tails(dtype: torch.dtype) -> None:
    counts = np.zeros(3)
    for ordinal in range(20):
        sizes = normal_from_bits(keyed_bits((500_000,), ordinal=ordinal), dtype).abs()
        counts += [(sizes > limit).sum().item() for limit in (4.0, 4.5, 5.0)]
    expected = 1e7 * np.array([math.erfc(limit / math.sqrt(2)) for limit in (4.0, 4.5, 5.0)])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all(), (counts, expected)
    assert normal_from_bits(torch.tensor([(1 << 22)]), torch.float32).abs() > 5


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential_is_exponential_and_never_zero(dtype: torch.dtype) -> None:
    extremes = exponential_from_bits(EXTREMES, dtype)
    assert extremes.isfinite().all() and (extremes > 0).all() and extremes.max() > 36
    values = exponential_from_bits(BITS, dtype).double()
    edges = np.array([*(np.arange(32) / 4 + 1 / 512 * (np.arange(32) > 0)), np.inf])
    if dtype in (torch.float64, torch.float32):
        check_chi_square(np.histogram(values, edges)[0], -np.diff(np.exp(-edges)) * len(BITS))
    assert abs(values.mean() - 1) < 5 / math.sqrt(len(BITS)) + 1e-3 * (dtype == torch.bfloat16)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.7, 0.999])
def test_bernoulli_has_its_probability(p: float) -> None:
    hits = bernoulli_from_bits(BITS, p).sum().item()
    assert abs(hits - p * len(BITS)) < 5 * math.sqrt(p * (1 - p) * len(BITS))


def test_bernoulli_is_exact_at_the_ends() -> None:
    for p in (0.0, torch.tensor(0.0)):
        assert not bernoulli_from_bits(torch.cat([EXTREMES, BITS]), p).any()
    for p in (1.0, 1, torch.tensor(1.0, dtype=torch.bfloat16)):
        assert bernoulli_from_bits(torch.cat([EXTREMES, BITS]), p).all()


@pytest.mark.parametrize("p", [0.0, 1e-17, 0.1, 1 / 3, 0.5, 1 - 2**-53, 1.0])
def test_bernoulli_of_a_number_and_of_a_tensor_agree(p: float) -> None:
    around = ((BITS[:1000] & 7) - 4 + math.floor(p * 2**53)).clamp(0, 2**53 - 1) << 11
    bits = torch.cat([EXTREMES, BITS, around, around | 2047])
    assert torch.equal(bernoulli_from_bits(bits, p), bernoulli_from_bits(bits, torch.tensor(p, dtype=torch.float64)))


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_bernoulli_refuses_a_bad_probability(p: float) -> None:
    with pytest.raises(BadInput, match="probability"):
        bernoulli_from_bits(BITS, p)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (-5, 59), (10**12, 10**12 + 100)])
def test_integers_are_flat(low: int, high: int) -> None:
    values = integers_from_bits(BITS, low, high)
    assert values.min() >= low and values.max() < high
    if high - low > 1:
        check_chi_square(np.bincount(values.numpy() - low, minlength=high - low), len(BITS) / (high - low))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2**63 - 1), (0, 2**63), (-(2**63), 2**63), (-(2**62), 2**62 + 2**61), (-(2**63), 2**62)]
)
def test_integers_span_all_of_int64(low: int, high: int) -> None:
    bits = torch.cat([EXTREMES, BITS])
    values = integers_from_bits(bits, low, high)
    unsigned = bits.numpy().view(U64)
    if high - low > 2**63 - 1:
        wanted = [low + int(word) % (high - low) for word in unsigned[:1000]]
        assert high - low == 2**64 or values[:1000].tolist() == wanted
    assert values.min().item() >= low and values.max().item() < high
    eighths = np.floor((values[len(EXTREMES) :].double().numpy() - low) / (high - low) * 8).clip(0, 7).astype(int)
    if high - low in (2**63 - 1, 2**63, 2**64):
        check_chi_square(np.bincount(eighths, minlength=8), len(BITS) / 8)


def check_bound(convert: Callable[[int], int | Tensor]) -> None:
    for low, high in [(0, 1), (3, 10), (-4, 2**40)]:
        assert torch.equal(integers_from_bits(BITS, convert(low), convert(high)), integers_from_bits(BITS, low, high))


def test_integers_take_bounds_from_the_device() -> None:
    check_bound(torch.tensor)
    assert (integers_from_bits(BITS[:9], torch.tensor(5), torch.tensor(5)) == 5).all(), "an empty range must not fault"


def test_integers_refuse_an_empty_range() -> None:
    with pytest.raises(BadInput, match="low < high"):
        integers_from_bits(BITS, 3, 3)


@pytest.mark.parametrize("convert", [uniform_from_bits, normal_from_bits, exponential_from_bits])
def test_a_dtype_without_a_distribution_is_refused(convert: Callable[[Tensor, torch.dtype], Tensor]) -> None:
    with pytest.raises(BadInput, match="complex64"):
        convert(BITS, torch.complex64)
