"""A number that only the device knows, asked for on the host: the refusal names the call, the line and what works."""

from __future__ import annotations

import math
import random
from math import log as natural

import numpy as np
import pytest
import torch

import zgcompile
from zgcompile.errors import CaptureRefused, ZgError
from zgcompile.testing import injected_draws

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
SEEDS = torch.tensor([3, 5, 5, 7, 9, 1, 1, 2])
generator = np.random.default_rng(0)


def distinct(seeds):
    return seeds.unique().numel()


def tolist(seeds):
    return X[seeds].sum() + seeds.tolist()[0]  # HERE


def tolist_of_a_chain(seeds):
    return [X[i].sum() for i in seeds.unique().tolist()]  # HERE


def numpy_of_a_tensor(seeds):
    return X[seeds].sum() + int(seeds.numpy()[0])  # HERE


def square_root(seeds):
    n = seeds.unique().numel()
    return X[seeds].sum() / math.sqrt(n)  # HERE


def logarithm(seeds):
    n = int((seeds > 3).sum())
    return X[seeds].sum() / natural(n)  # HERE


def square_root_of_a_tensor(seeds):
    total = X[seeds].pow(2).sum()
    return X[seeds].sum() / math.sqrt(total)  # HERE


def branch(seeds):
    n = int((seeds > 3).sum())
    if n < 5:  # HERE
        return X[seeds].sum()
    return X[seeds].mean()


def branch_on_a_length(seeds):
    if len(seeds) < 5:  # HERE
        return X[seeds].sum()
    return X[seeds].mean()


def choice(seeds):
    n = distinct(seeds)
    return X[seeds].mean() * (3 if n > 7 else 2)  # HERE


def both(seeds):
    n = distinct(seeds)
    return X[seeds].mean() * (n > 3 and n < 20)  # HERE


def loop(seeds):
    n = distinct(seeds)
    while n < 50:  # HERE
        n = 2 * n
    return X[seeds].mean() * n


def assertion(seeds):
    n = distinct(seeds)
    assert n > 3  # HERE
    return X[seeds].mean()


def numpy_draw(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(np.random.rand(n)).sum()  # HERE


def numpy_permutation(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(np.random.permutation(n)).sum()  # HERE


def numpy_choice(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(np.random.choice(n, 2)).sum()  # HERE


def numpy_generator(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(generator.normal(size=n)).sum()  # HERE


def numpy_new_generator(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(np.random.default_rng(0).integers(9, size=n)).sum()  # HERE


def numpy_range(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(np.arange(n)).sum()  # HERE


def numpy_zeros(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.from_numpy(
        np.zeros(  # HERE
            (n, 3),
        )
    )


def numpy_logarithm(seeds):
    n = distinct(seeds)
    return X[seeds].sum() * np.log(n)  # HERE


def numpy_array(seeds):
    n = distinct(seeds)
    return X[seeds].sum() + torch.tensor(np.array([n, 2])).sum()  # HERE


def host_draw(seeds):
    n = distinct(seeds)
    return X[seeds].sum() * random.randint(0, n)  # HERE


def index_into_a_list(seeds):
    k = int((seeds % 3).max())
    return X[seeds].sum() * [1.0, 2.0, 3.0][k]  # HERE


def repeated_list(seeds):
    n = distinct(seeds)
    return X[seeds].sum() * sum([0.5] * n)  # HERE


def text(seeds):
    n = distinct(seeds)
    name = f"size {n}"  # HERE
    return {name: X[seeds].sum()}


def text_of_a_value(seeds):
    return str(X[seeds].sum().item())  # HERE


@pytest.mark.parametrize(
    ("step", "what", "advice"),
    [
        (tolist, "seeds.tolist() reads a tensor", "return it"),
        (tolist_of_a_chain, "seeds.unique().tolist() reads a tensor", "return it"),
        (numpy_of_a_tensor, "seeds.numpy() reads a tensor", "return it"),
        (square_root, "math.sqrt(n) works on a Python number", "torch.sqrt(torch.tensor(n, dtype=torch.float32"),
        (logarithm, "natural(n) works on a Python number", "torch.log(torch.tensor(n, "),
        (square_root_of_a_tensor, "math.sqrt(total) works on a Python number", "torch.sqrt(total)"),
        (branch, "(if n < 5)", "torch.where(torch.tensor(n, device=...) < 5, a, b)"),
        (branch_on_a_length, "(if len(seeds) < 5)", "only whether it is 0 or 1"),
        (choice, "(if n > 7)", "torch.where(torch.tensor(n, device=...) > 7, a, b)"),
        (both, "n > 3 and n < 20", "torch.where"),
        (loop, "(while n < 50)", "static number of rounds"),
        (assertion, "(assert", "outside the step"),
        (numpy_draw, "np.random.rand(n) calls NumPy on the host", "torch.rand(n, device=...)"),
        (numpy_permutation, "np.random.permutation(n) calls NumPy", "torch.randperm(n, device=...)"),
        (numpy_choice, "np.random.choice(n, 2) calls NumPy", "torch.randint(low, high, (n,), device=...)"),
        (numpy_generator, "generator.normal(size=n) calls NumPy", "torch.randn(n, device=...)"),
        (numpy_new_generator, "integers(9, size=n) calls NumPy", "torch.randint(low, high, (n,), device=...)"),
        (numpy_range, "np.arange(n) calls NumPy on the host", "torch.arange(n, device=...)"),
        (numpy_zeros, "np.zeros((n, 3)) calls NumPy on the host", "torch.zeros(n, device=...)"),
        (numpy_logarithm, "np.log(n) calls NumPy on the host", "torch.log of torch.tensor(n, device=...)"),
        (numpy_array, "NumPy made an array of Python objects", "torch.tensor([n, ...], device=...)"),
        (host_draw, "random.randint(0, n) calls random on the host", "torch.randint(low, high, (n,), device=...)"),
        (index_into_a_list, "[1.0, 2.0, 3.0][k] indexes a Python object", "torch.tensor([...], device=...)[k]"),
        (text, "is made text", "format it outside the step"),
        (text_of_a_value, "is made text", "format it outside the step"),
        (repeated_list, "[0.5] * n needs a plain Python number", "keep it a tensor"),
    ],
)
def test_the_refusal_names_the_call(step, what, advice, check_refused):
    error = check_refused(step, SEEDS, kind=CaptureRefused)
    assert what in error.what, error
    assert advice in error.advice, error


ADVISED = {
    "sqrt": lambda s: X[s].sum() / torch.sqrt(torch.tensor(distinct(s), dtype=torch.float32)),
    "sqrt_of_a_value": lambda s: torch.sqrt(torch.tensor(X[s].pow(2).sum().item(), dtype=torch.float32)),
    "where": lambda s: torch.where(torch.tensor(distinct(s)) < 6, X[s].sum(), X[s].mean()),
    "where_of_a_value": lambda s: torch.where(torch.tensor(X[s].sum().item()) < 0, X[s].sum(), X[s].mean()),
    "table": lambda s: torch.tensor([1.0, 2.0, 3.0])[int((s % 3).max())],
    "numbers": lambda s: torch.tensor([distinct(s), 2]).sum(),
    "rand": lambda s: torch.rand(distinct(s)).sum(),
    "randn": lambda s: torch.randn(distinct(s)).sum(),
    "randint": lambda s: torch.randint(0, distinct(s), (distinct(s),)).sum(),
    "randperm": lambda s: torch.randperm(distinct(s))[:3].sum(),
    "arange": lambda s: torch.arange(distinct(s)).sum(),
    "zeros": lambda s: torch.zeros(distinct(s)).sum() + torch.full((distinct(s),), 2.0).sum(),
}


@pytest.mark.parametrize("name", ADVISED)
def test_what_the_advice_says_works(name):
    fn = ADVISED[name]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 12, (8 + i % 3,), generator=generator) for i in range(5)]
    step = zgcompile.compile(fn, warmup=1)
    torch.manual_seed(0)
    got = [step(batch) for batch in batches]
    torch.manual_seed(0)
    for mine, batch in zip(got, batches, strict=True):
        with injected_draws():
            assert torch.allclose(mine, fn(batch), rtol=1e-5)
    assert step.stats.replays >= 2


def test_a_users_error_in_a_library_call_stays_his():
    def step(seeds):
        np.random.randint(5, 2)
        return X[seeds].sum()

    with pytest.raises(ValueError, match="low >= high") as caught:
        zgcompile.compile(step, warmup=1)(SEEDS)
    assert not isinstance(caught.value, ZgError)
