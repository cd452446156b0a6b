"""Value ranges: what is proven holds on every value of an exact run, and what matters is proven."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Interpreter, Node

from tests.passes.rules.harness import Batch, Case, Fixed, Rows, Subject, prepare
from zgcompile.backend.exact import run_exact
from zgcompile.ir.sizes import evaluate
from zgcompile.ir.spans import UNKNOWN, Span, span_of

LONG, INT = torch.int64, torch.int32
IDS = Rows("n", (), LONG, 0, 7)
TABLE = Fixed((8,), LONG, 2, 30, proven=True)
SMALL = Fixed((5,), LONG, -3, 4, proven=True)
NARROW = Fixed((5,), INT, 0, 2**31 - 1, proven=True)


class Checked(Interpreter):
    """Runs at exact sizes and holds every integer value against the span of its node."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        super().__init__(subject.program.fx_graph)
        self.counts = run_exact(subject.program, batch.exact()).counts
        self.replace = subject.program.shape_env.replace

    def run_node(self, n: Node):
        value = super().run_node(n)
        spans = n.meta.get("spans") or [span_of(n)]
        values = value if isinstance(value, (tuple, list)) else [value]
        for span, data in zip(spans, values, strict=False):
            if isinstance(data, torch.Tensor) and not data.dtype.is_floating_point and data.numel() and span != UNKNOWN:
                low, high = int(data.min()), int(data.max())
                assert span.low <= low and high < span.high, f"{n.format_node()}: {low}..{high} is not in {span}"
                if span.below is not None:
                    assert high < evaluate(self.replace(span.below), self.counts.__getitem__, {}), (
                        f"{n.format_node()}: {span}"
                    )
        return value


def case(name, fn, *inputs):
    return Case(name, fn, inputs)


CASES = [
    case("arithmetic", lambda t, i: (t[i] + 3, t[i] - t[i + 1], t[i] * -2, t[i].cumsum(0), t[i].sum()), TABLE, IDS),
    case(
        "clamps",
        lambda s, x: (
            s.clamp(-1, 2),
            s.clamp(min=2),
            s.clamp(max=-2),
            s.clamp(min=9),
            s.clamp(max=-9),
            s.clamp(5, 1),
            x.sum(),
        ),
        SMALL,
        IDS,
    ),
    case(
        "clamped rows",
        lambda x: (
            torch.arange(x.shape[0]).clamp(min=0),
            torch.arange(x.shape[0]).clamp(max=3),
            torch.arange(x.shape[0]).clamp(min=4),
        ),
        IDS,
    ),
    case(
        "quotients", lambda s, x: (s // 2, torch.div(s, 2, rounding_mode="trunc"), s % 3, s // 4 + x.sum()), SMALL, IDS
    ),
    case("negative quotients", lambda s, x: ((s - 4) // 3, torch.div(s - 4, 3, rounding_mode="trunc"), x), SMALL, IDS),
    case(
        "casts that wrap",
        lambda t, x: ((t * 2**40).int(), (t * 2**30).int(), t.int(), t.to(torch.uint8), x.sum()),
        TABLE,
        IDS,
    ),
    case("sums that wrap", lambda t, x: (t + t, t * 3, t - t, x.sum()), NARROW, IDS),
    case(
        "joins",
        lambda t, s, i: (torch.cat([t[i], s]), torch.stack([t[i], i]), torch.where(i > 3, t[i], -1)),
        TABLE,
        SMALL,
        IDS,
    ),
    case("orders", lambda x: (*x.sort(), x.argsort(), *x.topk(2)), IDS),
    case(
        "places",
        lambda x, t: (torch.searchsorted(t.sort().values, x), torch.bucketize(x, t.sort().values), x.argmax(0)),
        IDS,
        TABLE,
    ),
    case("unique", lambda t, i: torch.unique(t[i], return_inverse=True, return_counts=True), TABLE, IDS),
    case("positions", lambda x: ((x > 3).nonzero(), torch.repeat_interleave(x), torch.arange(2, x.shape[0] + 2)), IDS),
    case(
        "written",
        lambda t, i, s: (t.index_put((i,), i), t.scatter(0, i, 99), t.index_put((i,), i, accumulate=True)),
        TABLE,
        IDS,
        SMALL,
    ),
    case(
        "extremes",
        lambda t, s, i: (torch.maximum(t[i], i), torch.minimum(t[i], i), t[i].amax(), t[i].min()),
        TABLE,
        SMALL,
        IDS,
    ),
    case(
        "fills", lambda x: (torch.full((x.shape[0],), 7), torch.ones_like(x), torch.zeros_like(x) - 1, (x > 2) * 1), IDS
    ),
]


@pytest.mark.parametrize("subject", CASES, ids=str)
def test_spans_hold(subject):
    prepared = prepare(subject)
    for batch in prepared.batches[:3]:
        Checked(prepared, batch).run(*batch.exact(), enable_io_processing=False)


def spans_of_outputs(fn, *inputs):
    prepared = prepare(case("", fn, *inputs))
    return [span_of(node) for node in prepared.program.outputs]


def test_what_an_index_needs_is_proven():
    rows, inverse = spans_of_outputs(
        lambda t, i: (torch.arange(i.shape[0]), torch.unique(t[i], return_inverse=True)[1]), TABLE, IDS
    )
    assert rows == Span(0, 9, rows.below) and rows.below is not None
    assert inverse.low == 0 and inverse.below is not None and inverse.below != rows.below
    assert spans_of_outputs(lambda t, i: t[i], TABLE, IDS) == [Span(2, 30)]


@pytest.mark.parametrize(
    ("fn", "span"),
    [
        (lambda s: s.clamp(max=-9), Span(-9, -8)),
        (lambda s: s.clamp(min=9), Span(9, 10)),
        (lambda s: s * 2**62, UNKNOWN),
        (lambda s: s.int() * 2**30, UNKNOWN),
        (lambda s: s // 2, Span(-2, 2)),
        (lambda s: s // -2, UNKNOWN),
        (lambda s: torch.add(s, s, alpha=2), UNKNOWN),
        (lambda s: s.cumsum(0), Span(-15, 16)),
        (lambda s: s.float().long(), UNKNOWN),
        (lambda s: s == 3, Span(0, 2)),
    ],
)
def test_ends(fn, span):
    assert spans_of_outputs(fn, SMALL) == [span]
