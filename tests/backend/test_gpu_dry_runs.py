"""Dry runs of the sampling on ids that nobody promised to be valid: on a GPU a wrong one would end the process."""

from __future__ import annotations

import pytest
import torch

import zgcompile
from tests.frontend.envelopes import draws, held, pairs_step, two_halves

pytestmark = pytest.mark.gpu


def test_an_invalid_id_ends_the_dry_runs_and_not_the_process():
    indptr, weight = (t.cuda() for t in two_halves())
    renamed = torch.arange(10_000, device="cuda")
    renamed[-1] = 2**40
    step = zgcompile.compile(lambda seeds: pairs_step(renamed[seeds], (indptr, weight)), warmup=2)
    for seeds in draws(0, 9_999, 6):
        result = step(seeds.cuda())
        assert float(result) == float(pairs_step(seeds.cuda(), (indptr, weight)))
    torch.cuda.synchronize()
    assert step.stats.envelope_fit.source == "random batches"
    assert step.stats.replays == 4


def test_capacities_do_not_depend_on_the_first_batches():
    indptr, weight = (t.cuda() for t in two_halves())
    rows = set()
    for seed in range(3):
        step = zgcompile.compile(lambda seeds: pairs_step(seeds, (indptr, weight)), warmup=2)
        for seeds in draws(0, 10_000, 4, seed):
            step(seeds.cuda())
        assert step.stats.envelope_fit.source == "random batches"
        rows.add(tuple(held(step)))
    assert len(rows) == 1
