from __future__ import annotations

import numpy as np
import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the ops)
from zgcompile.errors import BadInput

pack, unpack = torch.ops.zgcompile.pack_bits, torch.ops.zgcompile.unpack_bits
SHAPES = [(), (0,), (1,), (15,), (16,), (17,), (4099,), (3, 5, 7), (1027, 256)]


def expected(flags):
    packed = np.packbits(flags.reshape(-1), bitorder="little")
    out = np.zeros(2 * -(-flags.size // 16), dtype=np.uint8)
    out[: len(packed)] = packed
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_numpys_bits_and_back(device, rng, shape, density):
    flags = rng.random(shape) < density
    tensor = torch.from_numpy(np.asarray(flags)).to(device)
    bits = pack(tensor)
    assert bits.dtype == torch.uint8
    np.testing.assert_array_equal(bits.cpu().numpy(), expected(np.asarray(flags)))
    assert torch.equal(unpack(bits, list(shape)), tensor)


@pytest.mark.parametrize("view", [lambda t: t[:, ::3], lambda t: t.t(), lambda t: t[1:, 1:].reshape(-1)[1:]])
def test_strides_and_odd_addresses(device, rng, view):
    flags = view(torch.from_numpy(rng.random((70, 50)) < 0.5).to(device))
    np.testing.assert_array_equal(pack(flags).cpu().numpy(), expected(flags.cpu().numpy()))


def test_opcheck(device):
    flags = torch.tensor([[True, False, True], [False, True, True]], device=device)
    torch.library.opcheck(pack, (flags,))
    torch.library.opcheck(unpack, (pack(flags), [2, 3]))


@pytest.mark.parametrize("size", [[17], [-1], [3, 3]])
def test_refuses_another_size(size):
    with pytest.raises(BadInput, match="unpack_bits"):
        unpack(pack(torch.ones(40, dtype=torch.bool)), size)


def test_refuses_bytes():
    with pytest.raises(BadInput, match="must be bool"):
        pack(torch.ones(4, dtype=torch.uint8))


@pytest.mark.gpu
def test_replay_with_new_data(rng, replay):
    batches = [[torch.from_numpy(rng.random((300, 7)) < p).cuda()] for p in (0.2, 0.9, 0.0)]
    for (flags,), bits in zip(batches, replay(pack, batches), strict=True):
        np.testing.assert_array_equal(bits.cpu().numpy(), expected(flags.cpu().numpy()))
