"""Capacities: provable where a proof exists, else what was seen with headroom; equal sizes get equal capacities."""

from __future__ import annotations

import pytest
import torch
from zgcompile.passes.infer_bounds import infer_bounds
from zgcompile.passes.lower import symbols_of

from tests.passes.rules.harness import Fixed, Hyper, Rows, argument_symbols, trace
from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.spans import Span, span_of

LONG, BOOL = torch.int64, torch.bool
N, M, IDS, MASK = Rows("n", (4,)), Rows("m", (4,)), Rows("n", (), LONG, 0, 7), Rows("n", (), BOOL)


def bounded(fn, inputs, tables=(), envelope=None, **counts):
    """The capacity of each symbol that is no argument's, and the bounds; arguments were seen with `counts` rows, the
    rest with 500."""
    program = trace(fn, inputs)
    arguments = argument_symbols(program, inputs)
    observed = Observed(dict.fromkeys(symbols_of(program), 500) | {s: counts[g] for g, s in arguments.items()})
    bounds = infer_bounds(program, observed, envelope or Envelope(), dict(tables))
    return (
        [bounds.caps[s] for s in symbols_of(program) if s in bounds.caps and s not in arguments.values()],
        bounds,
        program,
        arguments,
    )


@pytest.mark.parametrize(
    ("fn", "inputs", "tables", "cap"),
    [
        (lambda x, m: x[m], (N, MASK), {}, 100),
        (lambda x: (x > 0).nonzero(), (N,), {}, 400),
        (lambda x, m: x.masked_select(m), (N, Fixed((4,), BOOL)), {}, 400),
        (lambda i: torch.unique(i), (IDS,), {}, 100),
        (lambda i: torch.unique_consecutive(i), (IDS,), {}, 100),
        (lambda t, i: torch.unique(t[i]), (Fixed((50,), LONG), IDS), {0: Span(0, 20)}, 20),
        (lambda t, i: torch.repeat_interleave(t[i]), (Fixed((50,), LONG), IDS), {0: Span(0, 4)}, 300),
        (lambda t, i: torch.repeat_interleave(t[i].clamp(max=3)), (Fixed((50,), LONG), IDS), {}, 300),
        (lambda t, i: torch.zeros(t[i].sum().item()), (Fixed((50,), LONG), IDS), {0: Span(0, 4)}, 300),
        (lambda t, i: torch.bincount(t[i]), (Fixed((50,), LONG), IDS), {0: Span(0, 20)}, 20),
        (lambda t, i: torch.bincount(t[i], minlength=30), (Fixed((50,), LONG), IDS), {0: Span(0, 20)}, 30),
        (lambda x, k: x[k.item() :], (N, Fixed((), LONG)), {}, 100),
        (lambda i: torch.repeat_interleave(i), (IDS,), {}, 576),
    ],
)
def test_capacity(fn, inputs, tables, cap):
    assert bounded(fn, inputs, tables, n=100)[0] == [cap]


def test_a_bound_of_a_bound():
    caps, *_ = bounded(
        lambda t, i, m: torch.unique(torch.cat([t[i], torch.arange(5)])[1:]), (Fixed((50,), LONG), IDS, MASK), n=100
    )
    assert caps == [104]


def test_sizes_that_have_to_agree_share_the_larger_capacity():
    _, bounds, _, arguments = bounded(lambda x, y: x + y, (N, M), n=100, m=30)
    assert bounds.caps[arguments["n"]] == bounds.caps[arguments["m"]] == 100


def test_value_ranges_follow_the_shared_capacity():
    """arange is below the raised capacity, not below the one of the first walk."""
    _, bounds, program, arguments = bounded(lambda x, y: (x + y, torch.arange(y.shape[0])), (N, M), n=100, m=30)
    span = span_of(program.outputs[1])
    assert (span.low, span.high) == (0, bounds.caps[arguments["m"]]) == (0, 100)


def test_an_override_by_line():
    line = "test_infer_bounds.py:" + str(test_an_override_by_line.__code__.co_firstlineno + 2)
    caps, *_ = bounded(lambda x, m: x[m], (N, MASK), envelope=Envelope(caps={line: 17}), n=100)
    assert caps == [17]


def test_arguments_need_no_headroom():
    _, bounds, _, arguments = bounded(lambda x: x + 1, (N,), n=77)
    assert bounds.caps[arguments["n"]] == 77


def test_ids_of_a_table_are_bounded_by_its_length():
    program = trace(lambda t, i: t[torch.unique(i)], (Fixed((50, 4)), IDS))
    (unique,) = (n for n in program.fx_graph.graph.nodes if n.target is torch.ops.aten._unique2.default)
    low = infer_bounds(program, Observed(ids={unique.name: (0, 6)}), Envelope(), {})
    above = infer_bounds(program, Observed(ids={unique.name: (0, 50)}), Envelope(), {})
    negative = infer_bounds(program, Observed(ids={unique.name: (-1, 6)}), Envelope(), {})
    assert (low.ids, above.ids, negative.ids) == ({unique.name: 50}, {unique.name: 64}, {})


def test_values_that_are_no_sizes_have_no_capacity():
    _, bounds, program, arguments = bounded(lambda x, k, h: x * k.item() * h, (N, Fixed((), LONG), Hyper()), n=10)
    assert list(bounds.caps) == [arguments["n"]]
    assert len(symbols_of(program)) == 2


def test_every_wait_of_the_host_is_listed():
    _, _, program, _ = bounded(lambda x, m, i: (x[m].sum(), torch.unique(i), i.sum().item()), (N, MASK, IDS), n=10)
    assert sorted(trip.op for trip in program.round_trips) == ["item", "mask index", "unique"]
    assert all(trip.where.file.endswith("test_infer_bounds.py") for trip in program.round_trips)
