"""The ways to add rows to a buffer that the tests of the scatter passes share."""

from __future__ import annotations

import torch


def put(target, index, values):
    return target.index_put((index,), values, accumulate=True)


def unsafe_put(target, index, values):
    return torch.ops.aten._unsafe_index_put(target, [index], values, True)


def row_add(target, index, values):
    return target.index_add(0, index, values)
