"""Masks of scattered sums: the same numbers from masked values, no mask on the buffer, and no change where 0 would not
stay 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.chain_scatter import chain_scatter
from zgcompile.passes.lower import lower
from zgcompile.passes.mask_before_scatter import MOST_ROWS, mask_before_scatter

from tests.passes.rules import harness
from tests.passes.rules.harness import Case, Fixed, Rows, backward
from tests.passes.scatters import put, row_add, unsafe_put
from zgcompile import pipeline
from zgcompile.backend.exact import run_exact
from zgcompile.backend.inductor import compile_with_inductor
from zgcompile.bench.sage import SAGE, make_step
from zgcompile.bench.synthetic import Shape, power_law
from zgcompile.frontend.arguments import Arguments, length_groups
from zgcompile.frontend.capture import capture
from zgcompile.frontend.guards import Guards
from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.keyed_numbers import bernoulli_from_bits, step_key

aten = torch.ops.aten
F64, LONG = torch.float64, torch.int64
N, F = 6, 3
SUMS = {aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default}
RANDOM = torch.Generator().manual_seed(0)
FIRST, SECOND = (torch.randint(0, N, (k,), generator=RANDOM) for k in (7, 4))
MASK, OTHER = (torch.rand(N, F, generator=RANDOM) < 0.5 for _ in range(2))
ROW = torch.tensor([[True], [True], [False], [True], [False], [True]])


def zeros(v, rows=N):
    return v.new_zeros(rows, *v.shape[1:])


def zero(v):
    return torch.zeros((), dtype=v.dtype)


def values(dtype=F64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(k, F, generator=generator, dtype=F64).mul(9).to(dtype) for k in (7, 4)]


def trace(fn, inputs) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(fn)(*[mode.from_tensor(t) for t in inputs])


def run(fn, inputs, tolerance=1e-12) -> tuple[bool, GraphModule, GraphModule]:
    """(changed, before, after), having compared the values, strides and fakes of the results."""
    before, after = trace(fn, inputs), trace(fn, inputs)
    changed = mask_before_scatter(after)
    assert not mask_before_scatter(after), "a second run finds more"
    results = [module(*[t.clone() for t in inputs]) for module in (before, after)]
    for old, new in zip(*[r if isinstance(r, tuple) else (r,) for r in results], strict=True):
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert new.stride() == old.stride()
    for node in after.graph.nodes:
        assert node.op in ("output", "get_attr") or isinstance(node.meta["val"], FakeTensor | list | tuple)
    return changed, before, after


def read_by(module: GraphModule) -> set:
    """The ops that read a sum of rows or a view of one, other than further sums and the end."""
    found, names = set(), [n for n in module.graph.nodes if n.target in SUMS]
    while names:
        for user in names.pop().users:
            if user.target in (aten.view.default, aten.permute.default, aten.alias.default, aten.detach.default):
                names.append(user)
            elif user.target not in SUMS and user.op != "output":
                found.add(user.target)
    return found


def assert_moved(fn, inputs, tolerance=1e-12, sums=1) -> GraphModule:
    changed, before, after = run(fn, inputs, tolerance)
    assert changed
    assert read_by(before) and not read_by(after)
    assert sum(n.target in SUMS for n in after.graph.nodes) == sums
    return after


def assert_left(fn, inputs) -> None:
    changed, before, after = run(fn, inputs)
    assert not changed
    assert str(after.graph) == str(before.graph)


def scattered(steps, add=put):
    return lambda v, *_: steps(add(zeros(v), FIRST, v))


STEPS = {
    "times a mask": lambda a: a * MASK,
    "a mask times": lambda a: aten.mul.Tensor(MASK, a),
    "times a float mask": lambda a: a * MASK.to(a.dtype),
    "times a scaled mask": lambda a: a * ((MASK.to(a.dtype) * 3).expand(N, F) / 2),
    "times a mask made in another type": lambda a: a * (2 * MASK.float()).to(a.dtype),
    "where": lambda a: torch.where(MASK, a, zero(a)),
    "where not": lambda a: torch.where(MASK, zero(a), a),
    "where not, by a full": lambda a: torch.where(MASK, torch.full((), 0, dtype=a.dtype), a),
    "where not, by a number": lambda a: torch.where(MASK, 0, a),
    "masked_fill": lambda a: aten.masked_fill.Scalar(a, MASK, 0),
    "dropout": lambda a: aten.native_dropout_backward(a, MASK, 1.25),
    "rows, numbers, sign": lambda a: torch.where(ROW, -(a * MASK * 2 / 3), zero(a)),
    "other overloads": lambda a: aten.div.Scalar(aten.mul.Scalar(a * MASK, 3), 7),
    "columns": lambda a: torch.where(OTHER[:1], a * MASK * OTHER[1] * OTHER[2, 0], zero(a)),
    "two masks": lambda a: torch.where(OTHER, zero(a), aten.native_dropout_backward(a, MASK, 2.0)),
    "views between": lambda a: torch.where(OTHER, (a.view(N, F).permute(0, 1) * MASK).detach(), zero(a)).view(-1, F),
    "a mask that the step computes": lambda a: a * (torch.arange(N * F).view(N, F) % 2 > 0),
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("add", [put, unsafe_put, row_add])
def test_steps(add, steps):
    assert_moved(scattered(steps, add), values())


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_two_sums(steps):
    def fn(v, w):
        return steps(row_add(put(zeros(v), FIRST, v).view(N, F), SECOND, w))

    after = assert_moved(fn, values(), sums=2)
    assert sum(n.target is aten.new_zeros.default for n in after.graph.nodes) == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_smaller_floats(steps, dtype, tolerance):
    assert_moved(scattered(steps), values(dtype), tolerance)


def test_int32_and_negative_indices():
    steps = STEPS["rows, numbers, sign"]
    assert_moved(lambda v, *_: steps(row_add(zeros(v), FIRST.int(), v)), values())
    assert_moved(lambda v, *_: steps(put(zeros(v), FIRST.int(), v)), values())
    assert_moved(lambda v, *_: steps(put(zeros(v), FIRST - N, v)), values())


def test_more_dimensions():
    mask = torch.rand(N, 2, F) < 0.5
    steps = lambda a: torch.where(ROW[:, :, None], a * mask * mask[:, :1] * mask[0], zero(a))
    assert_moved(scattered(steps), [torch.randn(7, 2, F, dtype=F64)])


def test_a_square_buffer():
    """A mask of its columns is none of its rows."""
    assert_moved(lambda v, *_: put(v.new_zeros(F, F), FIRST % F, v) * MASK[:F] * OTHER[3], values())


def test_a_buffer_of_one_row():
    mask = MASK[:1]
    _, _, after = run(lambda v: (v.new_zeros(1, F).index_add(0, FIRST[:4] * 0, v)) * mask, [values()[1]])
    assert aten.index.Tensor not in {n.target for n in after.graph.nodes}


def test_the_result_may_have_many_readers():
    _, _, after = run(lambda v, *_: (lambda a: (a, a + 1, a.sum(), a.t()))(put(zeros(v), FIRST, v) * MASK), values())
    assert not {aten.mul.Tensor} & read_by(after)
    assert {aten.add.Tensor, aten.sum.default} <= read_by(after)


def test_masks_between_sums():
    """What is scattered into a masked buffer is masked by the later masks alone."""
    after = assert_moved(lambda v, w: put(put(zeros(v), FIRST, v) * MASK, SECOND, w) * OTHER * 2, values(), sums=2)
    assert sum(n.target is aten.mul.Tensor for n in after.graph.nodes) == 5


def test_each_mask_is_taken_once_a_sum():
    def fn(v, w):
        mask = torch.arange(N * F).view(N, F) % 3 > 0
        return put(put(zeros(v), FIRST, v), SECOND, w) * mask * 2 * mask

    after = assert_moved(fn, values(), sums=2)
    assert sum(n.target is aten.index.Tensor for n in after.graph.nodes) == 2


def test_names_the_lines():
    module = trace(scattered(lambda a: torch.where(OTHER, a * MASK, zero(a))), values())
    for node in module.graph.nodes:
        node.meta["stack_trace"] = str(node.target)
    assert mask_before_scatter(module)
    named = {(str(n.target), n.meta["stack_trace"]) for n in module.graph.nodes if n.op == "call_function"}
    taken = {("aten.index.Tensor", line) for line in ("aten.mul.Tensor", "aten.where.self")}
    assert taken <= named and all(a == b for a, b in named - taken)


@pytest.mark.parametrize("rows", [MOST_ROWS * N, MOST_ROWS * N + 1])
def test_no_more_rows_than_pay(rows):
    index = torch.arange(rows) % N
    fn = lambda v, w: put(put(zeros(v), index[4:], v), index[:4], w) * MASK
    inputs = [torch.randn(rows - 4, F, dtype=F64), values()[1]]
    if rows <= MOST_ROWS * N:
        assert_moved(fn, inputs, sums=2)
    else:
        assert_left(fn, inputs)


# -- what 0 does not survive, or what no form of the rewrite is known for


FACTOR = torch.rand(N, F, dtype=F64, generator=RANDOM) + 1


@pytest.mark.parametrize(
    "steps",
    [
        lambda a: a * FACTOR,
        lambda a: a * MASK.mul(FACTOR),
        lambda a: a * (FACTOR * 2),
        lambda a: a * MASK.to(F64).log(),
        lambda a: a * (MASK.to(F64) + MASK),
        lambda a: a * (MASK.to(F64) * math.inf),
        lambda a: a * (MASK.to(F64) * 1e300 * 1e300),
        lambda a: a * (MASK.float() * 1e-30 * 1e60),
        lambda a: a * (MASK.to(F64) / 0),
        lambda a: a * aten.div.Tensor(1.0, MASK.to(F64)),
        lambda a: a * (1 / MASK.to(F64)),
        lambda a: a * (MASK.to(F64) / math.nan),
        lambda a: torch.where(MASK, a * FACTOR, zero(a)),
        lambda a: a * MASK.long(),
        lambda a: a / FACTOR,
        lambda a: torch.where(MASK, a, torch.ones((), dtype=F64)),
        lambda a: torch.where(MASK, a, FACTOR),
        lambda a: torch.where(MASK, a, torch.zeros(N, F, dtype=F64)),
        lambda a: aten.masked_fill.Scalar(a, MASK, 1),
        lambda a: a + 1,
        lambda a: a * 2,
        lambda a: a * 2 * ROW,
        lambda a: -a,
        lambda a: torch.where(MASK[0], a, zero(a)),
        lambda a: (a * math.inf) * MASK,
        lambda a: (a / 0) * MASK,
        lambda a: (a / math.nan) * MASK,
        lambda a: (a / 1e-310) * MASK,
        lambda a: aten.native_dropout_backward(a, MASK, math.inf),
        lambda a: a * (a > 0),
        lambda a: (a * MASK, a),
        lambda a: (a * MASK, a.view(-1) + 1),
        lambda a: (a[:3] * MASK[:3]),
        lambda a: (a.t() * MASK.t()),
        lambda a: (a.float() * MASK),
        lambda a: a.view(1, N, F) * MASK,
        lambda a: MASK.expand(2, N, F) * a,
        lambda a: torch.where(MASK.t().contiguous().t(), zero(a).expand(N, F), a),
    ],
)  # fmt: skip
def test_steps_that_are_left(steps):
    assert_left(scattered(steps), values())


@pytest.mark.parametrize(
    "fn",
    [
        lambda v, w: put(torch.ones(N, F, dtype=F64), FIRST, v) * MASK,
        lambda v, w: put(torch.zeros(N, F, dtype=F64) + 1, FIRST, v) * MASK,
        lambda v, w: put(w[:1].expand(N, F), FIRST, v) * MASK,
        lambda v, w: (lambda z: (put(z, FIRST, v) * MASK, z))(zeros(v)),
        lambda v, w: (lambda z: (put(z, FIRST, v) * MASK, put(z, SECOND, w)))(zeros(v)),
        lambda v, w: (lambda z: (put(z.view(N, F), FIRST, v) * MASK, z + 1))(zeros(v)),
        lambda v, w: (lambda z: (put(z, FIRST, v) * MASK, z + 1))(zeros(v).view(N, F)),
        lambda v, w: (lambda a: (a * MASK, put(a, SECOND, w)))(put(zeros(v), FIRST, v)),
        lambda v, w: zeros(v).index_put((FIRST,), v) * MASK,
        lambda v, w: zeros(v).scatter_add(0, FIRST[:, None].expand(7, F), v) * MASK,
        lambda v, w: put(zeros(v), FIRST, v).scatter_add(0, SECOND[:, None].expand(4, F), w) * MASK,
        lambda v, w: zeros(v).index_add(0, FIRST, v, alpha=2) * MASK,
        lambda v, w: v.new_zeros(7, F).index_add(1, FIRST[:F] % F, v) * MASK[FIRST],
        lambda v, w: v.new_zeros(F, F).index_add(1, FIRST[:F] % F, v[:F]) * MASK[:F],
        lambda v, w: put(zeros(v), FIRST[0], v[0]) * MASK,
        lambda v, w: put(zeros(v), FIRST, v[:1]) * MASK,
        lambda v, w: put(zeros(v), FIRST, v[:, :1]) * MASK,
        lambda v, w: put(zeros(v), FIRST, v[0, 0]) * MASK,
        lambda v, w: put(zeros(v), FIRST.view(7, 1), v[:, None]) * MASK,
        lambda v, w: zeros(v).index_put((FIRST, FIRST % F), v[:, 0], True) * MASK,
        lambda v, w: aten.index_put(zeros(v), [None, FIRST % F], w.new_ones(N, 7), True) * MASK,
        lambda v, w: aten.index_put(zeros(v), [torch.ones(N, dtype=torch.bool)], FACTOR, True) * MASK,
        lambda v, w: put(v.new_zeros(N), FIRST, v[:, 0]) * MASK[:, 0],
        lambda v, w: (lambda z: put(z, torch.arange(N), z) * MASK)(zeros(v)),
    ],
)  # fmt: skip
def test_sums_that_are_left(fn):
    assert_left(fn, values())


@pytest.mark.parametrize("dtype", [LONG, torch.int32, torch.bool])
def test_other_types_are_left(dtype):
    assert_left(scattered(lambda a: a * MASK, row_add), values(dtype))
    assert_left(scattered(lambda a: torch.where(MASK, a, zero(a)), row_add), values(dtype))


def test_a_change_of_type_is_left():
    assert_left(scattered(lambda a: a * MASK.to(F64)), values(torch.float32))


def test_complex_numbers_are_left():
    assert_left(scattered(lambda a: a * MASK), values(torch.complex128))


def test_a_sum_as_the_values_of_another_is_left():
    assert_left(lambda v, *_: put(zeros(v) + 1, torch.arange(N), put(zeros(v), FIRST, v)) * MASK, values())


def test_past_a_write_in_place_nothing_is_read():
    def fn(v, w):
        a = put(zeros(v), FIRST, v)
        v.copy_(v * 2)
        return a * MASK, v

    assert_left(fn, values())


def test_without_fakes_nothing_is_known():
    module = trace(scattered(lambda a: a * MASK), values())
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    assert not mask_before_scatter(module)


# -- infinities, NaNs and pads


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_where_drops_what_it_dropped(odd):
    """Every number that is masked out is odd, and none of the others."""
    v = torch.where(MASK[FIRST], values()[0], odd)
    fn = scattered(lambda a: torch.where(MASK, a, zero(a)) * OTHER * 2)
    after = assert_moved(fn, [v])
    assert after(v).isfinite().all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["times a mask", "times a scaled mask", "dropout", "rows, numbers, sign"])
def test_a_product_keeps_what_is_odd(name, odd):
    v = values()[0]
    v[2], v[5, 1] = odd, odd
    after = assert_moved(scattered(STEPS[name]), [v])
    assert not after(v).isfinite().all()


def test_pads_may_point_at_any_row():
    """Zeros scattered to a row whose mask says anything, and a buffer beyond the count: all stays 0."""
    valid = torch.arange(N)[:, None] < 4
    odd = torch.full((N, F), math.nan, dtype=F64).log() > 0

    def fn(v, w):
        v = torch.where(torch.arange(7)[:, None] < 5, v, zero(v))
        a = row_add(put(zeros(v), FIRST, v), SECOND, w)
        return torch.where(valid, torch.where(odd, zero(a), a * MASK * 2), zero(a))

    v, w = values()
    w[SECOND >= 4] = math.nan
    after = assert_moved(fn, [v, w], sums=2)
    assert (after(v, w)[4:] == 0).all() and after(v, w)[:4].isfinite().all()


def test_zeros_times_an_infinity_are_why_factors_are_left():
    factor = FACTOR.clone()
    factor[FIRST[0]] = math.inf
    assert_left(scattered(lambda a: a * factor), [torch.zeros(7, F, dtype=F64)])
    changed, _, after = run(scattered(lambda a: a * MASK * factor), [torch.zeros(7, F, dtype=F64)])
    assert changed and read_by(after) == {aten.mul.Tensor}


# -- through the lowering


def masked_layers(x, i, j, w, u):
    h = x @ w
    h = torch.where(h > 0, h * (h.detach() < 1.5), 0)
    return (h[i] * h[j].sin() + h.index_select(0, j)) @ u


CASE = Case(
    "masked layers",
    backward(masked_layers),
    (Rows("n", (3,), F64), Rows("m", (), LONG, 0, "n"), Rows("m", (), LONG, 0, "n"), Fixed((3, 3), F64),
     Fixed((3, 2), F64)),
    tolerance=1e-12,
)  # fmt: skip


@pytest.mark.parametrize("chained", [False, True])
def test_every_rule_of_a_case_holds_after_the_pass(monkeypatch, chained):
    """Poisoned pads, shrinking batches, too small capacities: all that the harness asks of a lowered step."""
    changed = []

    def masked(*args, **options):
        lowered = lower(*args, **options)
        if chained:
            chain_scatter(lowered.fx_graph)
        changed.append(mask_before_scatter(lowered.fx_graph))
        return lowered

    monkeypatch.setattr(harness, "lower", masked)
    harness.check_case(CASE)
    assert changed == [chained]


# -- a whole step


@pytest.fixture(scope="module")
def sage():
    """(lowered without the pass, lowered with it, inputs): three layers of GraphSAGE in float64, with pads."""
    torch.set_default_dtype(F64)
    try:
        yield lowered_twice()
    finally:
        torch.set_default_dtype(torch.float32)


def lowered_twice():
    torch.manual_seed(0)
    input_graph = power_law(Shape(500, 5000, 16, 5))
    model = SAGE((16, 12, 8, 5))
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), input_graph, (5, 3, 2))
    seeds = torch.randperm(500)[:16]
    arguments = Arguments.of((seeds,), {})
    captured = capture(step, arguments, length_groups(arguments.lengths(), []))
    program = pipeline.canonical(captured.program)
    step(seeds)
    guards = Guards(step, captured, arguments)
    lifted = [t.detach().clone() for t in guards.lifted]
    observed, key = Observed(), torch.tensor(step_key(3, 0))
    seen = run_exact(program, [key, torch.tensor(16), seeds, *guards.hypers, *[t.clone() for t in lifted]])
    observed.note(seen.counts, seen.ids)
    pair = []
    for moves in (lambda fx_graph: False, mask_before_scatter):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "mask_before_scatter", moves)
            pair.append(pipeline.lowered_step(program, observed, Envelope(headroom=1.3), {}, torch.device("cpu")))
    front = [torch.zeros(2, dtype=LONG), key, torch.tensor(13), torch.zeros(pair[0].argument_caps[0], dtype=LONG)]
    front[3][:13] = seeds[:13]
    inputs = [
        *front,
        torch.tensor(guards.hypers, dtype=F64),
        *lifted,
        *[torch.zeros(t.shape, dtype=t.dtype) for t in pair[0].gradient_inputs],
    ]
    assert [t.shape for t in inputs] == [t.shape for t in pair[0].example_inputs]
    return *pair, inputs


def test_a_whole_step_has_no_masks_behind_its_sums(sage):
    before, after, _ = sage
    masks = {aten.native_dropout_backward.default, aten.where.self}
    assert masks & read_by(before.fx_graph) and not masks & read_by(after.fx_graph)
    moved = [n for n in after.fx_graph.graph.nodes if n.target is aten.native_dropout_backward.default]
    assert len(moved) == 4 and all(n.args[1].target is aten.index.Tensor for n in moved)


def test_a_whole_step_trains_alike(sage):
    before, after, inputs = sage
    left, right = [t.clone() for t in inputs], [t.clone() for t in inputs]
    with torch.no_grad():
        old, new = before.fx_graph(*left), after.fx_graph(*right)
    assert not before.layout.failed([int(v) for v in old[0]])
    assert torch.equal(old[0], new[0])
    assert any(not torch.equal(a, b) for a, b in zip(inputs, left, strict=True))
    for a, b in zip([*old[2:], *left], [*new[2:], *right], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_inductor_reads_a_drawn_mask_at_rows():
    def fn(key, valid, i, v, j, w):
        mask = bernoulli_from_bits(torch.ops.zgcompile.keyed_bits(key, 3, [N, F]), 0.5)
        a = row_add(put(zeros(v), i, v), j, w)
        return [torch.where(valid, aten.native_dropout_backward(a, mask, 2.0), zero(a)), mask.sum()]

    v, w = values()
    inputs = [torch.tensor(-123456789123456789), ROW, FIRST, v, SECOND, w]
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    want = fn(*inputs)
    assert mask_before_scatter(module) and not read_by(module)
    for got, expected in zip(compile_with_inductor(module, inputs)(*inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
