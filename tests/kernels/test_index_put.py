from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

index_put = torch.ops.zgcompile.index_put


def expected(self, index, values, n):
    out = self.copy()
    for i in range(min(max(n, 0), len(index))):
        if 0 <= index[i] < len(out):
            out[index[i]] = values[i]
    return out


def check(self, index, values, n, device, view=lambda tensor: tensor):
    tensors = [view(torch.from_numpy(self).to(device)), view(torch.from_numpy(values).to(device))]
    before = tensors[0].clone()
    got = index_put(tensors[0], torch.from_numpy(index).to(device), tensors[1], torch.tensor(n, device=device))
    want = expected(view(torch.from_numpy(self)).numpy(), index, view(torch.from_numpy(values)).numpy(), n)
    np.testing.assert_array_equal(got.cpu().numpy(), want)
    assert torch.equal(tensors[0], before)


def rows(rng, length, trailing, dtype):
    return (100 * rng.random((length, *trailing))).astype(dtype)


def test_opcheck(device):
    index = torch.tensor([1, 0, 2, 5], device=device)
    arguments = torch.rand(3, 2, device=device), index, torch.rand(4, 2, device=device), torch.tensor(3, device=device)
    torch.library.opcheck(index_put, arguments)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, np.int32, np.float32, np.int64])
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("trailing", [(), (3,), (2, 8), (602,)])
def test_every_count_and_poison(device, rng, poisoned, trailing, id_dtype, dtype):
    length = 40
    index = rng.permutation(50)[:length].astype(id_dtype)
    self, values = rows(rng, 50, trailing, dtype), rows(rng, length, trailing, dtype)
    for n in (0, 1, 2, length - 1, length):
        for which in (0, 1):
            check(self, poisoned(index, n, which), poisoned(values, n, which), n, device)


@pytest.mark.parametrize("n", [-3, 7, 2**40])
def test_any_count_is_safe(device, n):
    check(np.zeros((3, 2)), np.array([2, 0]), np.ones((2, 2)), n, device)


@pytest.mark.parametrize("outside", [-1, 3, 2**40, -(2**62)])
def test_indices_outside_are_skipped(device, outside):
    check(np.zeros((3, 2)), np.array([2, outside, 0]), np.ones((3, 2)), 3, device)


def test_equal_indices_leave_one_of_the_values(device):
    self, index = torch.zeros(2, device=device), torch.tensor([1, 1, 1], device=device)
    got = index_put(self, index, torch.tensor([5.0, 6.0, 7.0], device=device), torch.tensor(2, device=device))
    assert got[0] == 0 and got[1].item() in (5.0, 6.0)


def test_empty(device):
    check(np.zeros((0, 3)), np.array([0, 1]), np.ones((2, 3)), 2, device)
    check(np.zeros((2, 0)), np.array([0, 1]), np.ones((2, 0)), 2, device)
    check(np.zeros((2, 3)), np.zeros(0, np.int64), np.ones((0, 3)), 2, device)


@pytest.mark.parametrize("view", [lambda t: t[:, ::2], lambda t: t[:, 1:], lambda t: t.t()])
def test_strides_and_odd_addresses(device, rng, view):
    for dtype in (np.int8, np.float32):
        check(
            rows(rng, 6, (6,), dtype),
            rng.permutation(view(torch.zeros(6, 6)).shape[0]),
            rows(rng, 6, (6,), dtype),
            2,
            device,
            view,
        )


def test_refuses_other_arguments():
    self, index, n = torch.zeros(3, 2), torch.tensor([0, 1]), torch.tensor(2)
    for values in (torch.zeros(2), torch.zeros(3, 2), torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(BadInput, match="zgcompile::index_put"):
            index_put(self, index, values, n)


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    counts = [900, 500, 2, 0]
    data = [
        (rows(rng, 1000, (5,), np.float32), rng.permutation(1000)[:900], rows(rng, 900, (5,), np.float32))
        for _ in counts
    ]
    batches = [
        [*(torch.from_numpy(array).cuda() for array in batch), torch.tensor(n, device="cuda")]
        for batch, n in zip(data, counts, strict=True)
    ]
    for batch, n, got in zip(data, counts, replay(index_put, batches), strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), expected(*batch, n))
