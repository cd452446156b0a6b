"""A static size against one that only the device knows: equal to eager where a rule covers it, else refused by the
line."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import zgcompile
from zgcompile.errors import UnsupportedOp

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
QUEUE = torch.zeros(64, 8)
POINTER = torch.zeros(1, dtype=torch.int64)


def filled_and_viewed(seeds):
    x = X[seeds.unique()]
    return torch.cat([x, TABLE[: 40 - x.shape[0]]]).view(20, 2, 8).sum(1)  # HERE


def filled_and_added(seeds):
    x = X[seeds.unique()]
    full = torch.cat([x, TABLE[: 40 - x.shape[0]]])
    return full + TABLE  # HERE


def filled_targets(seeds):
    x = X[seeds.unique()]
    full = torch.cat([x, TABLE[: 40 - x.shape[0]]])
    return F.cross_entropy(full, torch.arange(40) % 8)  # HERE


def shifted_queue(seeds):
    x = X[seeds.unique()]
    QUEUE.copy_(torch.cat([x, QUEUE[: -x.shape[0]]]))  # HERE
    return QUEUE.sum()


def narrowed_queue(seeds):
    x = X[seeds.unique()]
    QUEUE.narrow(0, int(POINTER), x.shape[0]).copy_(x)  # HERE
    return QUEUE.sum()


def viewed_argument(seeds):
    x = X[seeds]
    return x[: x.shape[0]].view(20, 2, 4).sum(1)  # HERE


def argument_against_a_table(seeds):
    return X[seeds] + TABLE[:20]  # HERE


FILL = "out[torch.arange(n)] = x"


@pytest.mark.parametrize(
    ("step", "what", "advice"),  # what: on either side of "|" according to the version of torch
    [
        (filled_and_viewed, "aten.view.default has no form on capacities", FILL),
        (filled_and_added, "aten.add.Tensor has no form on capacities", FILL),
        (filled_targets, "aten.nll_loss_forward.default has no form|cross_entropy makes a decision", ""),
        (narrowed_queue, "size expression|copy_.default makes a decision", "rows = start + torch.arange(n"),
        (viewed_argument, "only 20 rows of the argument 'seeds' fit here", "x.shape[0]"),
        (argument_against_a_table, "only 20 rows of the argument 'seeds' fit here", "x.shape[0]"),
    ],
)
def test_refused_by_the_line(step, what, advice, check_refused):
    seeds = torch.arange(20)
    step(seeds)
    QUEUE.zero_()
    error = check_refused(step, seeds)
    assert any(w in error.what for w in what.split("|")), error
    assert advice in error.advice, error


def test_a_queue_that_is_shifted():
    """Refused by the line where the trace cannot tell that 40 rows are left (torch 2.11), and otherwise right."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 40, (n,), generator=generator) for n in (20, 20, 7, 20, 1, 20, 60, 20)]
    QUEUE.zero_()
    expected = [shifted_queue(seeds) for seeds in batches]
    last = QUEUE.clone()
    QUEUE.zero_()
    fn = zgcompile.compile(shifted_queue, warmup=1)
    refused = None
    try:
        got = [fn(batches[0])]
    except UnsupportedOp as error:
        refused = error
    if refused is not None:
        assert refused.where is not None
        assert "# HERE" in refused.where.text
        return
    for result, want in zip([*got, *map(fn, batches[1:])], expected, strict=True):
        torch.testing.assert_close(result, want)
    assert torch.equal(QUEUE, last)
    assert fn.stats.replays >= 4


class Queue:
    def __init__(self):
        self.rows, self.columns = torch.zeros(64, 8), torch.zeros(8, 64)
        self.pointer = torch.zeros(1, dtype=torch.int64)


def moco(queue, seeds):
    x = X[seeds.unique()]
    n, at = x.shape[0], int(queue.pointer)
    queue.rows[at : at + n] = x
    queue.columns[:, at : at + n] = x.T
    queue.pointer[0] = (at + n) % 48
    return queue.rows.sum(0), queue.columns.sum(1)


def wrapping(queue, seeds):
    x = X[seeds.unique()]
    rows = (queue.pointer + torch.arange(x.shape[0])) % 64
    queue.rows[rows] = x
    queue.pointer.add_(x.shape[0]).remainder_(64)
    return queue.rows.sum(0)


def filled_by_a_write(queue, seeds):
    x = X[seeds.unique()]
    out = torch.zeros(40, 8)
    out[torch.arange(x.shape[0])] = x
    return out.view(20, 2, 8).sum(1), out + TABLE, F.cross_entropy(out, torch.arange(40) % 8), queue.rows.sum()


def filled_with_zeros(queue, seeds):
    x = X[seeds.unique()]
    return torch.cat([x, torch.zeros(40 - x.shape[0], 8)]).view(20, 2, 8).sum(1), queue.rows.sum()


BATCHES = [torch.randint(0, 60, (14 + i % 4,), generator=torch.Generator().manual_seed(i)) for i in range(8)]


def with_a_queue(step):
    def build():
        queue = Queue()
        return lambda seeds: step(queue, seeds), queue.rows, queue.columns, queue.pointer

    return build


@pytest.mark.parametrize("step", [wrapping, filled_by_a_write, filled_with_zeros])
def test_equal_to_eager(step, compare):
    assert compare(with_a_queue(step), BATCHES).stats.replays >= 3


def test_a_queue_cut_by_a_pointer_and_a_size(compare):
    """Some versions of torch cannot trace the assignment: there it is refused, with what `wrapping` does."""
    step, *_ = with_a_queue(moco)()
    refused = None
    try:
        zgcompile.compile(step, warmup=1)(BATCHES[0])
    except UnsupportedOp as error:
        refused = error
    if refused is None:
        assert compare(with_a_queue(moco), BATCHES).stats.replays >= 2
    else:
        assert refused.where is not None
        assert refused.where.text == "queue.rows[at : at + n] = x"
        assert "out[rows] = x" in refused.advice


def test_a_capacity_that_fits_no_shape_is_refused_when_it_is_met():
    """An even count lowers at the first call; the call that fits a capacity to an odd one names the line."""

    def step(seeds):
        x = X[seeds.unique()]
        x = x[: x.shape[0] - x.shape[0] % 2]
        return x.view(-1, 2, 8).sum()

    compiled = zgcompile.compile(step, warmup=2, envelope=zgcompile.Envelope(headroom=1.0))
    for length in (16, 17):
        assert torch.allclose(compiled(torch.arange(length)), step(torch.arange(length)))
    with pytest.raises(UnsupportedOp, match=r"test_static_sizes.py:\d+: aten.view.default has no form"):
        compiled(torch.arange(17))
