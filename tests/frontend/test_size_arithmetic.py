"""What users do with sizes: slices by them, rounding, shifted differences; equal to eager, or refused at the first
call."""

from __future__ import annotations

import math

import pytest
import torch

import zgcompile
from zgcompile.errors import UnsupportedOp


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 10, (8 + i % 4,), generator=generator) for i in range(6)]


def shifted(seeds):
    total = int((seeds % 3 + 1).sum().item())
    edges = torch.arange(total) * 2
    return (edges[1:] != edges[:-1]).sum(), (edges[1:] - edges[:-1]).sum()


def rounded(seeds):
    n = seeds.numel()
    return math.ceil(n / 4), round(n * 0.3), math.floor(n / 3), abs(5 - n)


def cut(seeds):
    few = (seeds > 4).nonzero().numel()
    return seeds[:-few].sum(), seeds[: 2 * seeds.numel()].sum(), seeds[:few].sum()


@pytest.mark.parametrize("fn", [shifted, rounded, cut])
def test_equals_eager(fn):
    step = zgcompile.compile(fn, warmup=1)
    for seeds in batches():
        assert [int(x) for x in step(seeds)] == [int(x) for x in fn(seeds)]


def test_a_whole_number_of_a_device_float_is_refused_at_the_first_call():
    step = zgcompile.compile(lambda seeds: int(seeds.float().mean() * 10), warmup=1)
    with pytest.raises(UnsupportedOp, match="whole number made from a float"):
        step(torch.arange(8))
