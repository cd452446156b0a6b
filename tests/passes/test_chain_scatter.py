"""Sums of scattered rows: one buffer afterwards, the same sums, and no change where a buffer has another reader."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.chain_scatter import chain_scatter
from zgcompile.passes.lower import lower

from tests.passes.rules import harness
from tests.passes.rules.harness import CPU, POISONS, Case, Fixed, Rows, backward, group_caps, prepare
from tests.passes.scatters import put, row_add, unsafe_put
from zgcompile import pipeline
from zgcompile.ir.envelope import Envelope

aten = torch.ops.aten
F64, LONG = torch.float64, torch.int64
ZERO_FILLS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
FIRST, SECOND, THIRD = (torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 4, 9))


def row_add_twice(target, index, values):
    return target.index_add(0, index, values, alpha=2)


def scatter_add(target, index, values):
    return target.scatter_add(0, index[:, None].expand(values.shape), values)


PUTS = [put, unsafe_put, row_add, row_add_twice, scatter_add]
FRESH = {
    "zeros": lambda v: torch.zeros(5, 3, dtype=v.dtype),
    "new_zeros": lambda v: v.new_zeros(5, 3),
    "zeros_like": lambda v: torch.zeros_like(v[:5]),
    "full": lambda v: torch.full((5, 3), 0, dtype=v.dtype),
    "full_like": lambda v: torch.full_like(v[:5], 0.0),
    "new_full": lambda v: v.new_full((5, 3), 0),
    "reshaped": lambda v: v.new_zeros(5, 3).permute(0, 1).view(-1, 3),
}


def zeros(v):
    return v.new_zeros(5, 3)


def square(v):
    return torch.cat([v, v[:, :2]], 1)


def trace(fn, inputs) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(fn)(*[mode.from_tensor(t) for t in inputs])


def values(dtype=F64):
    """A value for each of FIRST, SECOND and THIRD, and one of the shape of their sums."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 3, generator=generator, dtype=F64).mul(9).to(dtype) for n in (7, 4, 9, 5)]


def run(fn, inputs) -> tuple[bool, GraphModule, GraphModule]:
    """(changed, before, after), having compared the values, strides and fakes of the results."""
    before, after = trace(fn, inputs), trace(fn, inputs)
    changed = chain_scatter(after)
    assert not chain_scatter(after), "a second run finds more"
    results = [module(*[t.clone() for t in inputs]) for module in (before, after)]
    for old, new in zip(*[r if isinstance(r, tuple) else (r,) for r in results], strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)
        assert new.stride() == old.stride()
    for node in after.graph.nodes:
        assert node.op == "output" or isinstance(node.meta["val"], (torch.Tensor, list, tuple))
    return changed, before, after


def count(module: GraphModule, *targets) -> int:
    return sum(n.target in targets for n in module.graph.nodes)


def assert_chained(fn, inputs, sums=0, fills=1) -> list[Node]:
    changed, _, after = run(fn, inputs)
    assert changed
    assert (count(after, aten.add.Tensor), count(after, *ZERO_FILLS, aten.full.default)) == (sums, fills)
    return list(after.graph.nodes)


def assert_left(fn, inputs) -> None:
    changed, before, after = run(fn, inputs)
    assert not changed
    assert str(after.graph) == str(before.graph)


@pytest.mark.parametrize("dtype", [F64, torch.int64, torch.int32])
@pytest.mark.parametrize("second", PUTS)
@pytest.mark.parametrize("first", PUTS)
def test_two_summands(first, second, dtype):
    assert_chained(lambda v, w, *_: first(zeros(v), FIRST, v) + second(zeros(w), SECOND, w), values(dtype))


@pytest.mark.parametrize("fresh", FRESH.values(), ids=FRESH)
def test_every_way_to_make_zeros(fresh):
    _, _, after = run(lambda v, _, w, __: put(fresh(v), FIRST, v) + put(fresh(w), THIRD, w), values())
    assert [count(after, t) for t in (aten.add.Tensor, aten.index_put.default)] == [0, 2]
    assert sum("zeros" in str(n.target) or "full" in str(n.target) for n in after.graph.nodes) == 1


@pytest.mark.parametrize(
    "tree",
    [
        lambda a, b, c, d: a + b + c + d,
        lambda a, b, c, d: (a + b) + (c + d),
        lambda a, b, c, d: a + (b + (c + d)),
        lambda a, b, c, d: d + (c + (b + a)),
    ],
)
def test_more_summands(tree):
    assert_chained(
        lambda v, w, u, _: tree(
            *[put(zeros(v), i, x) for i, x in ((FIRST, v), (SECOND, w), (THIRD, u), (FIRST, v * 2))]
        ),
        values(),
    )


def test_zeros_of_both():
    """Equal zeros are merged by an earlier pass; an accumulation copies them, so that two may share them."""

    def fn(v, w, *_):
        shared = zeros(v)
        return put(shared, FIRST, v) + row_add(shared, SECOND, w)

    assert_chained(fn, values())


def test_reshapes_between():
    """As the rules of the lowering leave them."""

    def fn(v, w, *_):
        a = put(zeros(v).permute(0, 1).view(-1, 3), FIRST, v).view(5, 3).permute(0, 1)
        b = put(zeros(w).permute(0, 1).view(-1, 3), SECOND, w).view(5, 3).permute(0, 1)
        return a + b

    nodes = assert_chained(fn, values())
    first, second = [n for n in nodes if n.target is aten.index_put.default]
    assert second.args[0] is first


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("scatter", PUTS)
def test_onto_a_computed_value(scatter, swapped):
    def fn(v, _, __, y):
        y = y * 2
        scattered = scatter(zeros(v), FIRST, v)
        return scattered + y if swapped else y + scattered

    assert_chained(fn, values(), fills=0)


def test_onto_a_view_of_a_computed_value():
    assert_chained(lambda v, _, __, y: (y * 2).view(3, 5).view(5, 3) + put(zeros(v), FIRST, v), values(), fills=0)


def test_names_the_line_of_the_scatter():
    inputs = values()
    module = trace(lambda v, w, *_: put(zeros(v), FIRST, v) + put(zeros(w), SECOND, w), inputs)
    for i, node in enumerate(module.graph.nodes):
        node.meta["stack_trace"] = str(i)
    lines = {n.name: n.meta["stack_trace"] for n in module.graph.nodes}
    assert chain_scatter(module)
    assert all(n.meta["stack_trace"] == lines[n.name] for n in module.graph.nodes)


def both(tail):
    """A sum of two accumulations, and what else is made of its summands."""

    def fn(v, w, u, y):
        a, b = put(zeros(v), FIRST, v), put(zeros(w), SECOND, w)
        return tail(a, b, a + b, y)

    return fn


@pytest.mark.parametrize(
    "fn",
    [
        both(lambda a, b, c, y: (c, b)),
        both(lambda a, b, c, y: (c, b * 2)),
        both(lambda a, b, c, y: (c, a)),
        both(lambda a, b, c, y: (c, b[:2] + 1)),
        lambda v, w, *_: torch.add(put(zeros(v), FIRST, v), put(zeros(w), SECOND, w), alpha=2),
        lambda v, w, *_: put(zeros(v), FIRST, v) * put(zeros(w), SECOND, w),
        lambda v, *_: (lambda a: a + a)(put(zeros(v), FIRST, v)),
        lambda v, *_: (lambda a: a + a.view(5, 3))(put(zeros(v), FIRST, v)),
        lambda v, w, _, y: y + put(zeros(w), SECOND, w),
        lambda v, w, _, y: y.view(3, 5).view(5, 3) + put(zeros(w), SECOND, w),
        lambda v, w, u, y: u.split([5, 4])[0] + put(zeros(w), SECOND, w),
        lambda v, w, _, y: put(zeros(w), SECOND, w) + y * 2,
        lambda v, w, _, y: (lambda z: (z + put(zeros(w), SECOND, w), z))(y * 2),
        lambda v, w, _, y: (lambda z: (z.view(5, 3) + put(zeros(w), SECOND, w), z * 2))(y * 2),
lambda v, w, u, y: (lambda a, b: (a + put(zeros(w), SECOND, w), b))(*(u * 2).split([5, 4])),
        lambda v, w, _, y: (lambda z: (z + put(zeros(w), SECOND, w), z * 2))((y * 2).view(5, 3)),
        lambda v, w, _, y: square(y) + put(square(y).new_zeros(5, 5), SECOND, square(w)).permute(1, 0),
        lambda v, w, _, y: (y * 2)[:1] + put(zeros(w), SECOND, w),
        lambda v, w, _, y: (y * 2).float() + put(zeros(w), SECOND, w),
        lambda v, w, _, y: (y * 2).view(3, 5).t() + put(zeros(w), SECOND, w),
        lambda v, w, _, y: y * 2 + put(zeros(w), SECOND, w).index_put((SECOND[:1],), w[:1]),
        lambda v, w, _, y: (y * 2) + put(y.new_ones(5, 3), SECOND, w),
        lambda v, w, _, y: (y * 2) + put(torch.full_like(y, 1), SECOND, w),
        lambda v, w, _, y: (y * 2) + zeros(w).index_put((SECOND[:1],), w[:1]),
        lambda v, w, _, y: (y * 2) + put(put(zeros(w), SECOND, w) * 2, FIRST, v),
    ],
)  # fmt: skip
def test_left_alone(fn):
    assert_left(fn, values())


def test_a_link_with_another_reader_is_left():
    """Only the head of the second chain is read elsewhere, through a view."""

    def fn(v, w, u, y):
        z, head = y * 2, put(zeros(w), SECOND, w)
        return z + put(head, THIRD, u), head.view(-1)

    assert_left(fn, values())


def test_bools_are_left():
    flags = [torch.ones(n, 3, dtype=torch.bool) for n in (7, 4)]
    assert_left(lambda v, w: row_add(zeros(v), FIRST, v) + row_add(zeros(w), SECOND, w), flags)


def test_state_written_in_place_is_no_computed_value():
    def fn(v, w, _, y):
        return y.copy_(y + 1) + put(zeros(w), SECOND, w)

    changed, _, after = run(fn, values())
    assert not changed
    assert count(after, aten.copy_.default) == 1


# -- through the lowering


ROWS = (
    Rows("n", (3,), F64),
    Rows("m", (), LONG, 0, "n"),
    Rows("m", (), LONG, 0, "n"),
    Fixed((3, 3), F64),
)


def gathered_twice(x, i, j, w):
    h = (x @ w).exp()
    return h[i] * h[j].sin() + h.index_select(0, j)


CASE = Case("gathered", backward(gathered_twice), ROWS, tolerance=1e-12)


def lowered_inputs(subject, lowered, batch):
    return [
        torch.zeros(2, dtype=LONG),
        *[v.clone() for v in batch.padded(group_caps(subject), POISONS[0])[: 1 + subject.program.lengths + 3]],
        torch.zeros(0, dtype=F64),
        batch.values[3].clone(),
    ]


def test_the_gradient_of_a_tensor_gathered_thrice():
    subject = prepare(CASE)
    before, after = (lower(subject.program, subject.bounds, CPU) for _ in range(2))
    assert chain_scatter(after.fx_graph)
    accumulations = (aten.index_put.default, aten.index_add.default)
    scattered = {n for n in before.fx_graph.graph.nodes if n.target in accumulations}
    assert len(scattered) == 3 == count(after.fx_graph, *accumulations)
    assert count(before.fx_graph, *ZERO_FILLS) - count(after.fx_graph, *ZERO_FILLS) == 2
    for batch in subject.batches:
        inputs = lowered_inputs(subject, before, batch)
        old, new = (m.fx_graph(*[t.clone() for t in inputs]) for m in (before, after))
        assert torch.equal(old[0], new[0])
        for a, b in zip(old[2:], new[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_every_rule_of_a_case_holds_after_the_pass(monkeypatch):
    """Poisoned pads, shrinking batches, too small capacities: all that the harness asks of a lowered step."""
    changed = []

    def chained(*args, **options):
        lowered = lower(*args, **options)
        changed.append(chain_scatter(lowered.fx_graph))
        return lowered

    monkeypatch.setattr(harness, "lower", chained)
    harness.check_case(CASE)
    assert changed == [True]


def test_it_is_in_the_pipeline():
    subject = prepare(CASE)
    lowered = pipeline.lowered_step(subject.program, subject.observed, Envelope(), subject._tables(), CPU)
    puts = [n for n in lowered.fx_graph.graph.nodes if n.target in (aten.index_put.default, aten.index_add.default)]
    assert [p.args[0] in puts for p in puts] == [False, True, True]
