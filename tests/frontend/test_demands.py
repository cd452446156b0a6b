"""Where eager raises because of a value, or does something else because a size is 1, so does a compiled step: at a
replay, in a batch that runs at exact sizes, and in the first call."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import zgcompile
from zgcompile.errors import StepError


def rows(n):
    return torch.rand(n, 3)


def gram(x):
    return x.t() @ x


# name -> (step, a good batch of n rows, a batch for which eager raises)
RAISING = {
    "assertion": (lambda x: (torch._assert_async((x >= 0).all(), "no negative rows"), x.sum())[1], rows, -rows(5)),
    "assertion without words": (lambda x: (torch._assert_async((x >= 0).all()), x.sum())[1], rows, -rows(5)),
    "bernoulli": (lambda x: torch.bernoulli(x).sum(), rows, rows(5) + 1),
    "bernoulli of nan": (lambda x: torch.bernoulli(x).sum(), rows, rows(5) * torch.nan),
    "bernoulli_": (lambda x: torch.zeros_like(x).bernoulli_(x).sum(), rows, rows(5) - 1),
    "normal": (lambda x: torch.normal(0.0, x).sum(), rows, -rows(5)),
    "no weight": (lambda x: torch.multinomial(x, 2), rows, torch.zeros(5, 3)),
    "one row without weight": (
        lambda x: torch.multinomial(x, 2, replacement=True),
        rows,
        torch.cat([rows(4), torch.zeros(1, 3)]),
    ),
    "negative weights": (lambda x: torch.multinomial(x.sum(0), 2), rows, -rows(5)),
    "no integers": (
        lambda x: torch.randint(int(x.long().sum()), (3,), device=x.device),
        lambda n: rows(n) + 1,
        torch.zeros(5, 3),
    ),
    "input of a loss": (lambda x: F.binary_cross_entropy(x, torch.ones_like(x)), rows, rows(5) + 1),
    "target of a loss": (lambda x: F.binary_cross_entropy(torch.ones_like(x) / 2, x), rows, rows(5) - 1),
    "one_hot": (lambda x: F.one_hot((x * 4).long(), 4), rows, rows(5) + 1),
    "one_hot of a negative": (lambda x: F.one_hot((x * 4).long(), 4), rows, rows(5) - 2),
    "narrow": (
        lambda x: x.narrow(0, 0, int(x.long().sum())).sum(),
        lambda n: torch.eye(3).repeat(3, 1)[:n] + rows(n) / 2,
        -torch.ones(5, 3),
    ),
    "inv": (lambda x: torch.linalg.inv(gram(x)).sum(), rows, torch.zeros(5, 3)),
    "cholesky": (lambda x: torch.linalg.cholesky(gram(x)).sum(), rows, torch.zeros(5, 3)),
    "solve": (lambda x: torch.linalg.solve(gram(x), x.sum(0)).sum(), rows, torch.zeros(5, 3)),
    "count // (count - 1)": (lambda x: x.sum() + 7 // (x.shape[0] - 1), rows, rows(1)),
    "count % (count - 1)": (lambda x: x.sum() + 7 % (x.shape[0] - 1), rows, rows(1)),
    "count / (count - 1)": (lambda x: x.sum() * (1 / (x.shape[0] - 1)), rows, rows(1)),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=RAISING)
def case(request, device):
    step, good, bad = RAISING[request.param]
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        step(bad)  # the oracle, on the CPU: on a GPU some of them end the process's use of it
    seen = torch.zeros(2, device=device)

    def counted(x):
        """With state, which a failed step must leave as it was."""
        seen.add_(1)
        return step(x)

    return counted, lambda n: good(n).to(device), bad.to(device), seen


def refused(step, bad, seen):
    before, state = seen.clone(), random_state(seen)
    with pytest.raises((StepError, ZeroDivisionError)) as raised:
        step(bad)
    assert torch.equal(seen, before)
    assert torch.equal(random_state(seen), state)
    return raised


def random_state(like):
    return torch.cuda.get_rng_state() if like.is_cuda else torch.get_rng_state()


def test_at_a_replay(case):
    counted, good, bad, seen = case
    step = zgcompile.compile(counted, warmup=1, envelope=zgcompile.Envelope(headroom=2.0))
    for n in (9, 8, 9):
        step(good(n))
    replays = step.stats.replays
    assert replays == 2
    refused(step, bad, seen)
    step(good(8))
    assert step.stats.replays == replays + 1
    assert seen.tolist() == [4, 4]


def test_at_exact_sizes(case):
    counted, good, bad, seen = case
    step = zgcompile.compile(counted, warmup=5)
    step(good(9))
    refused(step, bad, seen)
    step(good(8))
    assert seen.tolist() == [2, 2]


def test_the_line_is_the_users(case):
    counted, good, bad, seen = case
    step = zgcompile.compile(counted, warmup=1)
    for n in (9, 8):
        step(good(n))
    raised = refused(step, bad, seen)
    if isinstance(raised.value, StepError):
        assert raised.value.where is not None
        assert raised.value.where.file.endswith("test_demands.py")


def test_an_exception_that_the_step_handles(device):
    def step(x):
        try:
            return torch.linalg.cholesky(gram(x)).sum()
        except RuntimeError:
            return -x.sum() - 1

    fn = zgcompile.compile(step, warmup=1)
    batches = [b.to(device) for b in (rows(9), rows(8), torch.zeros(8, 3), rows(9), torch.zeros(4, 3))]
    for batch in batches:
        torch.testing.assert_close(fn(batch), step(batch))
    assert fn.stats.preconditions == 2
    late = zgcompile.compile(step, warmup=9)
    for batch in batches:
        torch.testing.assert_close(late(batch), step(batch))


HANDLED = {
    "index": lambda x, m: x[m][0],
    "maximum of nothing": lambda x, m: x[m].max(0).values,
    "torch._check": lambda x, m: (torch._check(x[m].shape[0] > 0), x[m].sum(0))[1],
    "assertion": lambda x, m: (torch._assert_async(m.any()), x[m].sum(0))[1],
}


@pytest.mark.parametrize("name", HANDLED)
def test_whatever_eager_raises_the_step_may_handle(name):
    def step(x):
        try:
            return HANDLED[name](x, x[:, 0] > 0)
        except (IndexError, RuntimeError):
            return x.sum(0) - 1

    batches = [rows(9), rows(8), -rows(8), rows(9), -rows(3), rows(9)]
    for warmup in (1, 9):
        fn = zgcompile.compile(step, warmup=warmup)
        for batch in batches:
            torch.testing.assert_close(fn(batch), step(batch))
        assert fn.stats.preconditions == 2


def test_a_failed_index_in_front_of_an_exception_is_what_is_told():
    """The function itself would read out of range: on a GPU the end of the process's use of it."""
    table = torch.eye(3)

    def step(ids, x):
        return torch.linalg.cholesky(gram(table[ids]) * x.sum()).sum()

    fn = zgcompile.compile(step, warmup=1)
    for _ in range(3):
        fn(torch.arange(3), torch.ones(3, 3))
    with pytest.raises(StepError, match="out of bounds"):
        fn(torch.tensor([0, 1, 7]), torch.zeros(3, 3))


def test_good_values_cost_no_replay():
    def step(x):
        torch._assert_async((x >= 0).all())
        return F.binary_cross_entropy(x, torch.bernoulli(x)) * 0 + F.one_hot((x * 4).long(), 4).sum()

    fn = zgcompile.compile(step, warmup=1)
    for n in (9, 8, 7, 9):
        torch.testing.assert_close(fn(rows(n)), torch.tensor(3.0 * n))
    assert fn.stats.replays == 3


SQUEEZED = {
    "squeeze()": lambda x: x.squeeze(),
    "squeeze(0)": lambda x: torch.squeeze(x, 0),
    "squeeze(dim=-2)": lambda x: x.squeeze(dim=-2),
    "squeeze of several": lambda x: x.squeeze((0, 1)),
    "squeeze_": lambda x: (x * 1).squeeze_(),
    "squeeze of a sum": lambda x: x.sum(1, keepdim=True).squeeze(),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_a_dimension_of_one_row_is_dropped(name):
    def step(x):
        y = SQUEEZED[name](x)
        return y, torch.tensor([y.dim()])

    fn = zgcompile.compile(step, warmup=1)
    for n in (9, 8, 1, 9, 1, 2):
        x = rows(n)
        for got, want in zip(fn(x), step(x), strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)
    assert fn.stats.preconditions == 2


def test_squeezing_a_static_dimension_needs_no_decision():
    def step(x):
        return x.unsqueeze(1).squeeze(1).sum(1, keepdim=True).squeeze(-1)

    fn = zgcompile.compile(step, warmup=1)
    for n in (9, 8, 1, 9):
        x = rows(n)
        torch.testing.assert_close(fn(x), step(x))
    assert fn.stats.preconditions == 0
    assert fn.stats.replays == 3
