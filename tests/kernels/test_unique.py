from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

unique = torch.ops.zgcompile.unique


def expected(ids, n, bound, cap, need_counts=True):
    valid = ids[: max(n, 0)]
    inside = (valid >= 0) & (valid < bound)
    values, inverse, counts = np.unique(valid[inside], return_inverse=True, return_counts=True)
    kept = min(len(values), cap)
    full_inverse = np.zeros(len(ids), dtype=np.int64)
    full_inverse[: len(valid)][inside] = np.minimum(inverse, max(cap - 1, 0))
    full_values, full_counts = np.zeros(cap, dtype=ids.dtype), np.zeros(cap, dtype=np.int64)
    full_values[:kept], full_counts[:kept] = values[:kept], counts[:kept]
    return full_values, full_inverse, full_counts if need_counts else full_counts[:0], len(values), inside.all()


def compare(got, want):
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine.cpu().numpy(), theirs)
    _, inverse, counts, count, in_bound = got
    assert inverse.dtype == counts.dtype == count.dtype == torch.int64
    assert in_bound.dtype == torch.bool and count.shape == in_bound.shape == ()


def check(ids, n, bound, cap, device, need_counts=True, view=lambda tensor: tensor):
    tensor = view(torch.from_numpy(ids).to(device))
    got = unique(tensor, torch.tensor(n, device=device), bound, cap, need_counts)
    assert got[0].dtype == tensor.dtype
    compare(got, expected(view(torch.from_numpy(ids)).numpy(), n, bound, cap, need_counts))


@pytest.mark.parametrize("need_counts", [True, False])
def test_opcheck(device, need_counts):
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([7, 2, 7, 1], device=device, dtype=dtype)
        torch.library.opcheck(unique, (ids, torch.tensor(3, device=device), 10, 4, need_counts))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bound", [1, 33, 4096, 100_003])
@pytest.mark.parametrize("length", [5, 3001])
def test_every_count_and_poison(device, rng, poisoned, length, bound, dtype):
    ids = rng.integers(0, bound, length).astype(dtype)
    for n in (0, 1, 2, length - 1, length):
        for which in (0, 1):
            check(poisoned(ids, n, which), n, bound, length, device)


def test_agrees_with_aten(device, rng):
    ids = torch.from_numpy(rng.integers(0, 500, 3000)).to(device)
    want = torch.unique(ids, return_inverse=True, return_counts=True)
    got = unique(ids, torch.tensor(3000, device=device), 500, want[0].numel())
    for mine, theirs in zip(got[:3], want, strict=True):
        assert torch.equal(mine, theirs)


def test_dense_and_last_ids(device):
    check(np.arange(70_000), 70_000, 70_000, 70_000, device)
    check(np.array([2_499_999, 0, 2_499_999]), 3, 2_500_000, 3, device)


@pytest.mark.parametrize("n", [-3, 7, 2**40])
def test_any_count_is_safe(device, n):
    check(np.array([3, 1, 3]), n, 4, 3, device)


@pytest.mark.parametrize("cap", [0, 1, 100])
@pytest.mark.parametrize("need_counts", [True, False])
def test_overflow_reports_the_true_count(device, rng, cap, need_counts):
    check(rng.integers(0, 8000, 5000), 4900, 8000, cap, device, need_counts)


@pytest.mark.parametrize("outside", [-1, 10, 2**40, -(2**62)])
def test_ids_out_of_bound_are_skipped_and_reported(device, outside):
    ids = np.array([4, outside, 2, 4])
    check(ids, 4, 10, 4, device)
    check(ids, 1, 10, 4, device)  # the bad id is a pad here
    check(ids, 4, 0, 4, device)


def test_bound_above_the_dtype(device):
    check(np.array([5, -1, 5], dtype=np.int32), 3, 2**32, 3, torch.device("cpu"))


def test_empty(device):
    check(np.zeros(0, dtype=np.int64), 0, 10, 0, device)
    check(np.zeros(0, dtype=np.int64), 5, 10, 3, device)


@pytest.mark.parametrize("view", [lambda t: t[::3], lambda t: t[1:]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strides(device, rng, view, dtype):
    check(rng.integers(0, 40, 300).astype(dtype), 90, 40, 300, device, view=view)


def test_refuses_other_arguments():
    n = torch.tensor(1)
    for ids in (torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int16)):
        with pytest.raises(BadInput, match="zgcompile::unique: ids"):
            unique(ids, n, 3, 3)
    with pytest.raises(BadInput, match="bound"):
        unique(torch.zeros(3, dtype=torch.int64), n, -1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [232_965, 2_500_000, 9_000_000])
def test_sizes_of_a_training_step(rng, bound):
    popular = (bound * rng.random(300_000) ** 5).astype(np.int64)
    check(popular, 290_000, bound, 200_000, torch.device("cuda"))


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    bound, cap = 50_000, 4000
    ids = [rng.integers(0, high, 6000).astype(np.int32) for high in (5000, 50_000, 3000, 1)]
    ids[2][7] = -1
    counts = [6000, 5000, 2000, 1]
    batches = [[torch.from_numpy(i).cuda(), torch.tensor(n, device="cuda")] for i, n in zip(ids, counts, strict=True)]
    results = replay(lambda i, n: unique(i, n, bound, cap), batches)
    for i, n, got in zip(ids, counts, results, strict=True):
        compare(got, expected(i, n, bound, cap))
