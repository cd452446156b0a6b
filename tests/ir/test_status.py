"""Which of several failed checks says what happened to a step."""

from __future__ import annotations

import pytest

from zgcompile.ir.status import Check, CountSlot, Failure, MetadataLayout, decisive

USER, PRECONDITION, CAPACITY = Failure.USER_ERROR, Failure.PRECONDITION, Failure.CAPACITY


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ([USER], 0),
        ([CAPACITY, USER], 0),  # what follows an overflow may be its fault
        ([USER, CAPACITY], 0),  # a bad seed is the user's, however many counts it spoils behind
        ([USER, PRECONDITION], 1),
        ([PRECONDITION, USER], 0),
        ([CAPACITY, PRECONDITION], 0),
        ([USER, CAPACITY, PRECONDITION], 2),
        ([USER, USER], 0),
    ],
)
def test_decisive(failed, says):
    checks = [Check(failure, f"check {i}", None) for i, failure in enumerate(failed)]
    assert decisive(checks) is checks[says]


def test_layout_reads_checks_then_counts():
    checks = tuple(Check(CAPACITY, name, None) for name in "ab")
    layout = MetadataLayout(checks, (CountSlot("u0", 4, "rows"), CountSlot("u1", None, "item")))  # type: ignore[arg-type]
    assert layout.size == 4
    assert layout.failed([0, 1, 7, 9]) == [checks[1]]
    assert layout.count_values([0, 1, 7, 9]) == {"u0": 7, "u1": 9}
