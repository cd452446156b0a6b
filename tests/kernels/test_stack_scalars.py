from __future__ import annotations

import pytest
import torch

import zgcompile.kernels  # noqa: F401 (registers the op)
from zgcompile.errors import BadInput

stack = torch.ops.zgcompile.stack_scalars


@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_the_words_in_order(device, size):
    words = [(1 << 40) - 3 * i for i in range(size)]
    scalars = [torch.tensor(word, device=device) for word in words]
    assert stack(scalars).tolist() == words
    torch.library.opcheck(stack, (scalars,))


@pytest.mark.parametrize("scalars", [[], [torch.tensor(1.0)], [torch.tensor(1), torch.arange(1)]])
def test_anything_else_is_refused(scalars):
    with pytest.raises(BadInput, match="0-d int64"):
        stack(scalars)
