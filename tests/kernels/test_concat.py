from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

concat = torch.ops.zgcompile.concat

DTYPES = [np.bool_, np.int8, np.float16, np.int32, np.float32, np.int64, np.float64, np.complex128]


def expected(pieces, counts, cap):
    valid = np.concatenate([piece[: max(count, 0)] for piece, count in zip(pieces, counts, strict=True)])
    out = np.zeros((cap, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    out[: min(len(valid), cap)] = valid[:cap]
    return out


def check(pieces, counts, cap, device, view=lambda tensor: tensor):
    tensors = [view(torch.from_numpy(piece).to(device)) for piece in pieces]
    got = concat(tensors, torch.tensor(counts, device=device), cap)
    want = expected([view(torch.from_numpy(piece)).numpy() for piece in pieces], counts, cap)
    assert got.dtype == tensors[0].dtype and got.is_contiguous()
    np.testing.assert_array_equal(got.cpu().numpy(), want)


def rows(rng, length, trailing, dtype):
    return (100 * rng.random((length, *trailing))).astype(dtype)


def test_opcheck(device):
    pieces = [torch.rand(3, 2, device=device), torch.rand(4, 2, device=device)]
    torch.library.opcheck(concat, (pieces, torch.tensor([2, 4], device=device), 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 8), (602,)])
def test_every_count_and_poison(device, rng, poisoned, trailing, dtype):
    lengths = (9, 1, 6)
    pieces = [rows(rng, length, trailing, dtype) for length in lengths]
    for counts in ([0, 0, 0], [1, 0, 2], [2, 1, 0], [8, 0, 5], [9, 1, 6]):
        for which in (0, 1):
            if dtype != np.complex128:
                pieces = [poisoned(piece, count, which) for piece, count in zip(pieces, counts, strict=True)]
            check(pieces, counts, 16, device)
            check(pieces, counts, 40, device)


def test_bfloat16(device, rng):
    pieces = [torch.from_numpy(rng.random((5, 3))).to(device, torch.bfloat16) for _ in range(2)]
    got = concat(pieces, torch.tensor([2, 5], device=device), 9)
    assert torch.equal(got, torch.cat([pieces[0][:2], pieces[1], got.new_zeros(2, 3)]))


def test_any_count_is_safe(device, rng):
    pieces = [rows(rng, 4, (), np.int64) for _ in range(3)]
    check(pieces, [2**40, -5, 3], 12, device)


@pytest.mark.parametrize("cap", [0, 1, 5, 6])
def test_overflow_drops_the_rest(device, rng, cap):
    check([rows(rng, 5, (3,), np.float32) for _ in range(2)], [4, 5], cap, device)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 128, 129, 300])
def test_many_pieces(device, rng, k):
    pieces = [rows(rng, int(length), (), np.int64) for length in rng.integers(0, 9, k)]
    counts = [int(rng.integers(0, len(piece) + 1)) for piece in pieces]
    check(pieces, counts, sum(counts) + 5, device)
    check(pieces, counts, max(sum(counts) - 5, 0), device)


@pytest.mark.parametrize("view", [lambda t: t[::2], lambda t: t[1:], lambda t: t[:, 1:3], lambda t: t.t()])
def test_strides_and_odd_addresses(device, rng, view):
    for dtype in (np.int8, np.float32):
        check([rows(rng, 6, (6,), dtype) for _ in range(2)], [2, 3], 9, device, view)


def test_empty(device):
    check([np.zeros((0, 4), np.float32)], [0], 0, device)
    check([np.zeros((0, 4), np.float32), np.ones((2, 4), np.float32)], [3, 1], 2, device)
    check([np.zeros((2, 0), np.float32)], [1], 3, device)


def test_refuses_other_arguments():
    one = torch.zeros(3)
    for pieces, counts in [
        ([], torch.zeros(0, dtype=torch.int64)),
        ([one], torch.tensor([1, 2])),
        ([one], torch.tensor([1], dtype=torch.int32)),
        ([one, one.double()], torch.tensor([1, 2])),
        ([one, torch.zeros(3, 1)], torch.tensor([1, 2])),
    ]:
        with pytest.raises(BadInput, match="zgcompile::concat"):
            torch.ops.zgcompile.concat(pieces, counts, 3)


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    cap = 500
    pieces = [[rows(rng, length, (7,), np.float32) for length in (300, 400)] for _ in range(4)]
    counts = [[300, 400], [100, 200], [0, 7], [0, 0]]
    batches = [
        [*(torch.from_numpy(piece).cuda() for piece in batch), torch.tensor(count, device="cuda")]
        for batch, count in zip(pieces, counts, strict=True)
    ]
    results = replay(lambda a, b, c: concat([a, b], c, cap), batches)
    for batch, count, got in zip(pieces, counts, results, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), expected(batch, count, cap))
