from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

compact = torch.ops.zgcompile.compact


def expected(flags, n, cap):
    positions = np.flatnonzero(flags[: max(n, 0)])
    out = np.zeros(cap, dtype=np.int64)
    out[: min(len(positions), cap)] = positions[:cap]
    return out, len(positions)


def check(flags, n, cap, device, view=lambda tensor: tensor):
    tensor = view(torch.from_numpy(flags).to(device))
    positions, count = compact(tensor, torch.tensor(n, device=device), cap)
    want, total = expected(view(torch.from_numpy(flags)).numpy(), n, cap)
    assert positions.dtype == count.dtype == torch.int64
    assert count.shape == () and count.item() == total
    np.testing.assert_array_equal(positions.cpu().numpy(), want)


def test_opcheck(device):
    flags = torch.tensor([True, False, True, True], device=device)
    torch.library.opcheck(compact, (flags, torch.tensor(3, device=device), 4))


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("length", [5, 4096, 20_001])
def test_every_count_and_poison(device, rng, poisoned, length, density):
    flags = rng.random(length) < density
    for n in (0, 1, 2, length - 1, length):
        for which in (0, 1):
            check(poisoned(flags, n, which), n, length, device)


@pytest.mark.parametrize("n", [-3, 7, 2**40])
def test_any_count_is_safe(device, n):
    check(np.array([True, False, True]), n, 3, device)


@pytest.mark.parametrize("cap", [0, 1, 100])
def test_overflow_reports_the_true_count(device, rng, cap):
    check(rng.random(9000) < 0.5, 8500, cap, device)


def test_cap_above_the_length(device, rng):
    check(rng.random(10) < 0.5, 9, 30_000, device)


def test_empty(device):
    check(np.zeros(0, dtype=np.bool_), 0, 0, device)
    check(np.zeros(0, dtype=np.bool_), 5, 3, device)


@pytest.mark.parametrize("view", [lambda t: t[::3], lambda t: t[1:], lambda t: t.view(3, -1).t()[:, 1]])
def test_strides_and_odd_addresses(device, rng, view):
    check(rng.random(30_000) < 0.5, 9000, 9500, device, view)


@pytest.mark.parametrize(
    ("flags", "n"),
    [
        (torch.zeros(3, dtype=torch.uint8), torch.tensor(1)),
        (torch.zeros(3, 1, dtype=torch.bool), torch.tensor(1)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([1])),
        (torch.zeros(3, dtype=torch.bool), torch.tensor(1, dtype=torch.int32)),
    ],
)
def test_refuses_other_arguments(flags, n):
    with pytest.raises(BadInput, match="zgcompile::compact"):
        compact(flags, n, 3)
    with pytest.raises(BadInput, match="cap"):
        compact(torch.zeros(3, dtype=torch.bool), torch.tensor(1), -1)


@pytest.mark.gpu
@pytest.mark.slow
def test_tiles_of_several_chunks(rng):
    check(rng.random(9_000_001) < 0.3, 8_999_999, 3_000_000, torch.device("cuda"))


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    length, cap = 10_000, 3000
    flags = [rng.random(length) < density for density in (0.2, 0.9, 0.1, 0.0)]
    counts = [length, 9000, 4000, 1]
    batches = [[torch.from_numpy(f).cuda(), torch.tensor(n, device="cuda")] for f, n in zip(flags, counts, strict=True)]
    results = replay(lambda f, n: compact(f, n, cap), batches)
    for f, n, (positions, count) in zip(flags, counts, results, strict=True):
        want, total = expected(f, n, cap)
        assert count.item() == total
        np.testing.assert_array_equal(positions.cpu().numpy(), want)
