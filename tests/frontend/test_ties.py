"""Equal values at the edge of a ranking: pads, which rank as the worst value there is, are behind every valid row."""

from __future__ import annotations

import pytest
import torch

import zgcompile

ROWS = 5_000  # more than one block of a GPU's radix select


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [7, ROWS])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_ties_takes_no_pad(device, rows, largest):
    worst = -torch.inf if largest else torch.inf

    def step(scores, wanted):
        values, places = scores.masked_fill(~wanted, worst).topk(5, largest=largest)
        return values, places

    fn = zgcompile.compile(step, warmup=1, envelope=zgcompile.Envelope(headroom=1.0))

    def batch(n, share):
        return torch.randn(n, device=device), torch.rand(n, device=device) < share

    for n in (rows + 400, rows + 400, rows + 399):
        fn(*batch(n, 1.0))
    replays = fn.stats.replays
    for share in (0.0, 2 / rows):
        scores, wanted = batch(rows, share)
        values, places = fn(scores, wanted)
        torch.testing.assert_close(values, step(scores, wanted)[0])
        assert int(places.max()) < rows
        assert len(set(places.tolist())) == 5
    assert fn.stats.replays == replays + 2
