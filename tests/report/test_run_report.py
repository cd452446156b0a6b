"""The numbers and tables of `zgcompile run`."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from zgcompile.errors import SourceLine
from zgcompile.frontend.stats import CapacityUse, Stats
from zgcompile.ir.program import RoundTrip
from zgcompile.report.run_report import RunReport, StepReport, Timing, Waiting

LINE = SourceLine("folder/train.py", 31, "sample", "total = int(num.sum().item())")


def step_report(**changes):
    stats = Stats(
        calls=10,
        replays=7,
        eager_runs=3,
        captures=1,
        traces=1,
        host_reads=7,
        deferred_reads=5,
        envelope={"a": CapacityUse("folder/train.py:31", 90, 120)},
    )
    trips = Waiting.grouped(
        [
            RoundTrip(LINE, "item", "u0", "a count"),
            RoundTrip(None, "unique", "u1", "own", 3),
            RoundTrip(LINE, "item", "u2", "a count"),
        ]
    )
    values = {
        "name": "train_step",
        "where": "folder/train.py:40",
        "device": "cpu",
        "stats": stats,
        "round_trips": trips,
        "reads_after": 1,
        "deferred": 0.5,
        "eager": Timing.of([0.004, 0.002, 0.003]),
        "compiled": Timing.of([0.001]),
        "parity_error": 1e-7,
        "parity_compared": 12,
        "parity_note": "",
    }
    return StepReport(**(values | changes))


def text_of(report):
    console = Console(width=120, no_color=True)
    with console.capture() as text:
        for table in report.tables():
            console.print(table)
    return text.get()


def row(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {start}")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_timing_is_the_median_with_its_spread():
    timing = Timing.of([0.001 * k for k in range(1, 12)])
    assert (timing.median, timing.low, timing.high, timing.runs) == pytest.approx((6, 2, 10, 11))
    assert Timing.of([]) is None


def test_equal_lines_are_counted_together():
    trips = step_report().round_trips
    assert [(t.where, t.op, t.count) for t in trips] == [("folder/train.py:31", "item", 2), ("?", "unique", 3)]
    assert step_report().reads_before == 5


def test_tables():
    text = text_of(step_report())
    assert ["item", "2", "0", "a count"] in [[c.strip() for c in line.split("│")[2:-1]] for line in text.splitlines()]
    assert row(text, "all") == ["all", "", "5", "1", ""]
    assert row(text, "status")[3] == "1"
    assert row(text, "speedup")[1] == "3.00x"
    assert row(text, "ms a step, eager")[1] == "3.000 (2.000 to 4.000, 3 runs)"
    assert row(text, "parity")[1] == "largest relative error 1.0e-07 in 12 comparisons"
    assert row(text, "calls")[1] == "10: 7 replays, 3 at exact sizes"
    assert "75%" in text


def test_what_was_not_measured_says_so():
    text = text_of(
        step_report(
            eager=None,
            compiled=None,
            parity_error=None,
            parity_note="no call reached a replay",
            stats=Stats(calls=2, eager_runs=2),
        )
    )
    assert row(text, "ms a step, compiled")[1] == "not measured: 0 replays in 2 calls"
    assert row(text, "parity")[1] == "not checked; no call reached a replay"
    assert "speedup" not in text
    assert "envelope" not in text


def test_json_is_plain_and_whole():
    report = RunReport("train.py", 0, [step_report(parity_error=float("inf"))])
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    (step,) = data["steps"]
    assert step["parity_error"] == "inf"
    assert step["speedup"] == pytest.approx(3.0)
    assert (step["reads_before"], step["reads_after"], step["replays"], step["calls"]) == (5, 1, 7, 10)
    assert step["envelope"] == [{"name": "folder/train.py:31", "used": 90, "held": 120}]
    assert step["round_trips"][0]["text"] == LINE.text
