from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

repeat_interleave = torch.ops.zgcompile.repeat_interleave


def expected(repeats, n, cap):
    valid = repeats[: max(n, 0)]
    index = np.repeat(np.arange(len(valid)), np.maximum(valid, 0))
    out = np.zeros(cap, dtype=repeats.dtype)
    out[: min(len(index), cap)] = index[:cap]
    return out, -1 if (valid < 0).any() else len(index)


def check(repeats, n, cap, device, view=lambda tensor: tensor):
    tensor = view(torch.from_numpy(repeats).to(device))
    index, total = repeat_interleave(tensor, torch.tensor(n, device=device), cap)
    want, count = expected(view(torch.from_numpy(repeats)).numpy(), n, cap)
    assert index.dtype == tensor.dtype
    assert total.dtype == torch.int64 and total.shape == () and total.item() == count
    np.testing.assert_array_equal(index.cpu().numpy(), want)


def test_opcheck(device):
    for dtype in (torch.int32, torch.int64):
        repeats = torch.tensor([2, 0, 3, 1], device=device, dtype=dtype)
        torch.library.opcheck(repeat_interleave, (repeats, torch.tensor(3, device=device), 8))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("length", [5, 1024, 5003])
def test_every_count_and_poison(device, rng, poisoned, length, dtype):
    repeats = rng.integers(0, 7, length).astype(dtype)
    cap = int(repeats.sum())
    for n in (0, 1, 2, length - 1, length):
        for which in (0, 1):
            check(poisoned(repeats, n, which), n, cap, device)


def test_agrees_with_aten(device, rng):
    repeats = torch.from_numpy(rng.integers(0, 5, 3000)).to(device)
    index, total = repeat_interleave(repeats, torch.tensor(3000, device=device), int(repeats.sum()))
    want = torch.ops.aten.repeat_interleave.Tensor(repeats)
    assert index.dtype == want.dtype and torch.equal(index, want) and total.item() == want.numel()


@pytest.mark.parametrize("n", [-3, 7, 2**40])
def test_any_count_is_safe(device, n):
    check(np.array([3, 1, 2]), n, 8, device)


@pytest.mark.parametrize("cap", [0, 1, 2047, 2048, 2049, 10_000])
def test_overflow_reports_the_true_total(device, rng, cap):
    check(rng.integers(0, 9, 5000), 4900, cap, device)


def test_heavy_row_between_zeros(device):
    repeats = np.zeros(6000, dtype=np.int64)
    repeats[[5, 3000, 5999]] = 1, 50_000, 2
    check(repeats, 6000, 50_100, device)
    check(repeats, 6000, 30_000, device)


def test_total_beyond_32_bits(device):
    check_total = repeat_interleave(torch.tensor([2**31, 2**31, 5], device=device), torch.tensor(3, device=device), 4)
    assert check_total[1].item() == 2**32 + 5
    assert check_total[0].tolist() == [0, 0, 0, 0]


def test_negative_repeat_is_reported(device):
    check(np.array([2, -1, 3]), 3, 6, device)
    check(np.array([2, -1, 3]), 1, 6, device)  # a pad may be negative
    check(np.array([-(2**40)] * 3000), 3000, 6, device)


def test_empty(device):
    check(np.zeros(0, dtype=np.int64), 0, 0, device)
    check(np.zeros(0, dtype=np.int64), 5, 3, device)


@pytest.mark.parametrize("view", [lambda t: t[::3], lambda t: t[1:]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strides(device, rng, view, dtype):
    check(rng.integers(0, 4, 3000).astype(dtype), 900, 4000, device, view)


def test_refuses_other_arguments():
    n = torch.tensor(1)
    for repeats in (torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int16)):
        with pytest.raises(BadInput, match="zgcompile::repeat_interleave: repeats"):
            repeat_interleave(repeats, n, 3)


@pytest.mark.gpu
@pytest.mark.slow
def test_tiles_of_several_chunks(rng):
    repeats = rng.integers(0, 4, 2_500_001)
    check(repeats, 2_499_000, int(repeats.sum()), torch.device("cuda"))


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    cap = 12_000
    repeats = [rng.integers(0, high, 4000).astype(np.int32) for high in (6, 9, 3, 2)]
    counts = [4000, 3000, 2000, 1]
    batches = [
        [torch.from_numpy(r).cuda(), torch.tensor(n, device="cuda")] for r, n in zip(repeats, counts, strict=True)
    ]
    results = replay(lambda r, n: repeat_interleave(r, n, cap), batches)
    for r, n, (index, total) in zip(repeats, counts, results, strict=True):
        want, count = expected(r, n, cap)
        assert total.item() == count
        np.testing.assert_array_equal(index.cpu().numpy(), want)
