"""Every golden case: its text, and what must hold of any case (see `golden`)."""

from __future__ import annotations

from pathlib import Path

import golden
import golden_checks
import pytest
from golden import Case

from zgcompile.errors import ZgError

CASES = [golden.read_case(path) for path in sorted(Path(__file__).parent.glob("*/*.ir"))]
GOOD = [case for case in CASES if case.error is None]


def _all(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda c: f"{c.path.parent.name}/{c.path.stem}")


def _through(name: str) -> pytest.MarkDecorator:
    return _all([case for case in GOOD if case.passes[-1] == name])


@_all(GOOD)
def test_text(case: Case, accepting: bool) -> None:
    found = golden.transform(case).text
    if accepting and case.after is not None and found != case.after:
        golden.accept(case, found)
        return
    assert found == case.expected


@_all([case for case in CASES if case.error is not None])
def test_error(case: Case) -> None:
    with pytest.raises(ZgError) as raised:
        golden.transform(case)
    assert str(raised.value) == case.error


@_all(CASES)
def test_round_trip(case: Case) -> None:
    for text in [case.before, *([case.after] if case.after else [])]:
        assert golden.round_trip(text) == text


@_all(GOOD)
def test_second_run_changes_nothing(case: Case) -> None:
    once, twice = golden.transform(case), golden.transform(case, times=2)
    assert twice.text == once.text


@_through("canonicalise")
def test_changed_means_other_text(case: Case) -> None:
    outcome = golden.transform(case)
    assert outcome.changed == (outcome.text != case.before)
    assert not golden.transform(case, times=2).changed
    golden_checks.check_same_results(case, outcome)


@_through("infer-bounds")
def test_bounds_hold(case: Case) -> None:
    golden_checks.check_bounds(case, golden.transform(case))


@_through("lower")
def test_lowered_step_is_the_exact_step(case: Case) -> None:
    assert golden_checks.check_lowered(case, golden.transform(case)) >= 2


def test_each_pass_has_cases() -> None:
    folders = {case.path.parent.name for case in CASES}
    assert folders == {"canonicalise", "infer_bounds", "lower"}
    assert all(case.passes[-1].replace("-", "_") == case.path.parent.name for case in CASES)
    assert all(case.title.startswith(f"{case.passes[-1]}: ") for case in CASES)
