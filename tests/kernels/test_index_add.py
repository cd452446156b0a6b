from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

index_add = torch.ops.zgcompile.index_add

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64]
# What a sum of a few numbers below 8 may be off, whatever its order.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 2.0, torch.float16: 0.25}


def expected(index, source, n, rows):
    out = np.zeros((rows, *source.shape[1:]), dtype=source.dtype)
    for i in range(min(max(n, 0), len(index))):
        if 0 <= index[i] < rows:
            out[index[i]] += source[i]
    return out


def check(index, source, n, rows, device, dtype, view=lambda tensor: tensor):
    tensor = view(torch.from_numpy(source).to(device, dtype))
    ids = torch.from_numpy(index).to(device)
    got = index_add(ids, tensor, torch.tensor(n, device=device), rows)
    assert got.dtype == dtype and got.is_contiguous()
    exact = tensor.to(torch.float64 if dtype.is_floating_point else torch.int64).cpu().numpy()
    want = expected(index, exact, n, rows)
    np.testing.assert_allclose(got.to(torch.float64).cpu(), want, atol=TOLERANCE.get(dtype, 0), rtol=0)
    return got


def numbers(rng, shape):
    return rng.integers(-7, 8, shape) + rng.integers(0, 4, shape) / 4


def test_opcheck(device):
    index = torch.tensor([1, 0, 1, 5], device=device)
    for source in (torch.rand(4, 3, device=device), torch.arange(4, device=device)):
        torch.library.opcheck(index_add, (index, source, torch.tensor(3, device=device), 2))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("trailing", [(), (3,), (6,), (2, 16)])
def test_every_count_and_poison(device, rng, poisoned, trailing, id_dtype, dtype):
    length, rows = 70, 9
    index = rng.integers(0, rows, length).astype(id_dtype)
    source = numbers(rng, (length, *trailing))
    if not dtype.is_floating_point:
        source = source.astype(np.int64)
    for n in (0, 1, 2, length - 1, length):
        results = []
        for which in (0, 1):
            bad = poisoned(source, n, which)
            if dtype == torch.int32:
                bad = poisoned(source.astype(np.int32), n, which)
            results.append(check(poisoned(index, n, which), bad, n, rows, device, dtype))
        if device.type == "cpu" or not dtype.is_floating_point:
            assert torch.equal(*results)


@pytest.mark.parametrize("width", [1, 2, 4, 31, 33, 100, 602])
def test_widths(device, rng, width):
    index = rng.integers(0, 5, 40)
    check(index, numbers(rng, (40, width)), 39, 5, device, torch.float32)


@pytest.mark.parametrize("n", [-3, 7, 2**40])
def test_any_count_is_safe(device, n):
    check(np.array([1, 0, 1]), np.ones((3, 2)), n, 2, device, torch.float32)


@pytest.mark.parametrize("outside", [-1, 2, 2**40, -(2**62)])
def test_indices_outside_are_skipped(device, outside):
    check(np.array([1, outside, 1]), np.ones((3, 4)), 3, 2, device, torch.float32)


def test_sums_beyond_32_bits(device):
    got = index_add(
        torch.zeros(4, dtype=torch.int64, device=device),
        torch.tensor([2**62, -(2**61), 2**40, -1], device=device),
        torch.tensor(4, device=device),
        1,
    )
    assert got.tolist() == [2**62 - 2**61 + 2**40 - 1]


def test_empty(device):
    check(np.zeros(0, np.int64), np.zeros((0, 3)), 0, 4, device, torch.float32)
    check(np.zeros(0, np.int64), np.zeros((0, 3)), 3, 0, device, torch.float32)
    check(np.zeros(3, np.int64), np.zeros((3, 0)), 3, 2, device, torch.float32)
    check(np.zeros(3, np.int64), np.zeros((3, 2)), 3, 0, device, torch.float32)


@pytest.mark.parametrize(
    "view", [lambda t: t[:, ::2], lambda t: t[:, 1:], lambda t: t[:, :4].contiguous().view(-1)[2:]]
)
def test_strides_and_odd_addresses(device, rng, view):
    source = numbers(rng, (20, 12))
    length = view(torch.from_numpy(source)).shape[0]
    check(rng.integers(0, 5, length), source, length - 1, 5, device, torch.float32, view)


def test_agrees_with_aten(device, rng):
    index = torch.from_numpy(rng.integers(0, 300, 5000)).to(device)
    source = torch.from_numpy(numbers(rng, (5000, 12))).to(device)
    want = source.new_zeros(300, 12).index_add_(0, index, source)
    torch.testing.assert_close(index_add(index, source, torch.tensor(5000, device=device), 300), want)


def test_refuses_other_arguments():
    index, n = torch.tensor([0, 1]), torch.tensor(2)
    for source in (torch.zeros(3), torch.zeros(()), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int8)):
        with pytest.raises(BadInput, match="zgcompile::index_add"):
            index_add(index, source, n, 2)
    with pytest.raises(BadInput, match="rows"):
        index_add(index, torch.zeros(2), n, -1)


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    length, rows = 3000, 200
    counts = [length, 2000, 100, 0]
    data = [(rng.integers(-5, rows + 5, length), numbers(rng, (length, 8))) for _ in counts]
    batches = [
        [torch.from_numpy(i).cuda(), torch.from_numpy(s).cuda().float(), torch.tensor(n, device="cuda")]
        for (i, s), n in zip(data, counts, strict=True)
    ]
    results = replay(lambda i, s, n: index_add(i, s, n, rows), batches)
    for (i, s), n, got in zip(data, counts, results, strict=True):
        np.testing.assert_allclose(got.cpu().numpy(), expected(i, s, n, rows), atol=1e-3)
