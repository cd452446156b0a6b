"""Python arithmetic on numbers that live on the device, in float64."""

from __future__ import annotations

from tests.passes.rules.harness import Case, Fixed, Hyper, Rows, check_case, swept

N, H, S = Rows("n"), Hyper(0.3), Fixed(())

CASES = [
    Case("sums", lambda x, h: (h + 1.0) * 2 - h / 3, (N, H)),
    Case("powers", lambda x, h: (x * h**2, x * 2.0**h), (N, H)),
    Case(
        "quotient of counts",
        lambda x, y: x.sum() * (x.shape[0] / y.shape[0]),
        (N, Rows("m")),
        batches=({"n": 9, "m": 6}, {"n": 7, "m": 3}),
    ),
    Case("an item", lambda x, s: (x * s.item(), s.item() * 2), (N, S)),
    Case("items", lambda x, s: x.sum().item() + s.item(), (N, S)),
    Case("negated", lambda x, h: x * -h, (N, H)),
    Case("square root", lambda x, h: x * h**0.5, (N, H)),
]


@swept(CASES)
def test_case(case, pytestconfig):
    check_case(case, thorough=pytestconfig.getoption("--slow"))
