"""When two results of a step agree."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from zgcompile.frontend.comparison import Report, Result, Tolerances, _compare, compared

DEFAULT = Tolerances(None, None, 0.0, 1e-4)
NAN, INF = float("nan"), float("inf")


def entry(expected, got, kind="state", tolerances=DEFAULT, **options):
    return _compare("x", kind, "FX graph", expected, got, tolerances, **options)


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [(torch.float64, 5e-10, 2e-9), (torch.float32, 5e-4, 2e-3), (torch.bfloat16, 1e-2, 5e-2)],
)
def test_floats_agree_relative_to_the_largest_magnitude(dtype, within, beyond):
    x = torch.tensor([100.0, 0.0], dtype=torch.float64)
    off = torch.tensor([0.0, 100.0], dtype=torch.float64)
    assert entry(x.to(dtype), (x + within * off).to(dtype)).ok
    bad = entry(x.to(dtype), (x + beyond * off).to(dtype))
    assert not bad.ok
    assert bad.max_abs_error == pytest.approx(100 * beyond, rel=0.01)
    assert bad.max_rel_error == pytest.approx(beyond, rel=0.01)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.ones(2), torch.ones(3)),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])),
        (torch.tensor([NAN]), torch.tensor([INF])),
        (torch.tensor([INF]), torch.tensor([-INF])),
        (torch.tensor([1.0]), torch.tensor([NAN])),
        (torch.tensor([1.0]), None),
        (3, 4),
        (3, 3.0),
        (1.0, 1.001),
        (torch.zeros(2), torch.full((2,), 1e-12)),
        ("a", "b"),
    ],
)
def test_what_differs(expected, got):
    bad = entry(expected, got)
    assert not bad.ok
    assert bad.max_rel_error > 0


def test_what_agrees():
    x = torch.tensor([NAN, INF, -INF, 1.0])
    for value in (x, None, 3, 2.5, "a", torch.empty(0), torch.tensor([1, 2])):
        assert entry(value, value.clone() if isinstance(value, torch.Tensor) else value).ok
    assert entry(1.0, 1.00001).ok
    assert entry(torch.zeros(2), torch.full((2,), 1e-8), kind="output").ok  # an atol for outputs alone


def test_given_tolerances_decide():
    a, b = torch.tensor([1.0]), torch.tensor([1.01])
    assert entry(a, b, tolerances=Tolerances(0.1, None, 0.0, 0.0)).ok
    assert entry(a, b, tolerances=Tolerances(0.0, 0.1, 0.0, 0.0)).ok
    assert not entry(a, b, tolerances=Tolerances(1e-3, 1e-3, 0.0, 0.0)).ok


def program(*names):
    return SimpleNamespace(lifted=[SimpleNamespace(name=name, kind=kind) for name, kind in names])


@pytest.mark.parametrize(("gradient", "ok"), [(1e-9, True), (1e-2, False)])
def test_a_gradient_of_rounding_noise_leaves_its_adam_update_open(gradient, ok):
    """Adam makes a step of lr out of any gradient; the sign of noise is nobody's to keep."""
    lifted = program(("w", "tensor"), ("b", "tensor"))
    before = {0: torch.zeros(1), 1: torch.zeros(1)}

    def result(sign):
        return Result(
            [],
            {0: torch.tensor([1.0]), 1: torch.tensor([sign * gradient])},
            {0: torch.tensor([0.01]), 1: torch.tensor([sign * 0.01])},
        )

    entries = compared(lifted, result(1), result(-1), before, "FX graph", DEFAULT)
    assert {e.name: e.ok for e in entries} == {"w.grad": True, "b.grad": ok, "w": True, "b": ok}


def test_a_lost_gradient_differs():
    entries = compared(
        program(("w", "tensor")), Result([], {0: torch.ones(2)}, {}), Result([], {0: None}, {}), {}, "FX graph", DEFAULT
    )
    assert [e.ok for e in entries] == [False]


def test_the_report_shows_each_tensor_once():
    good, bad = entry(torch.ones(2), torch.ones(2)), entry(torch.ones(2), torch.zeros(2))
    report = Report("step", [good, bad])
    assert not report.ok
    assert report.max_error == 1.0
    assert report.failures == [bad]
    assert str(report).count("DIFFERS") == 1
    assert Report("step").ok
    assert Report("step").max_error == 0.0
    assert math.isinf(entry(torch.ones(2), None).max_rel_error)
