"""Backwards that compare: the same bits from a kept comparison, and no float tensor held for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.keep_comparisons import keep_comparisons
from zgcompile.passes.lower import lower

from tests.passes.rules import harness
from tests.passes.rules.harness import CPU, Case, Fixed, Rows, backward, prepare
from zgcompile import pipeline
from zgcompile.backend.replay import own_ops, planned_kernels
from zgcompile.ir.aliases import storage_root, viewed
from zgcompile.ir.envelope import Envelope

aten = torch.ops.aten
PACK, UNPACK = torch.ops.zgcompile.pack_bits.default, torch.ops.zgcompile.unpack_bits.default
BACKWARDS = (aten.threshold_backward.default, aten.leaky_relu_backward.default, aten.hardtanh_backward.default)
FLOATS = [torch.float64, torch.float32, torch.float16]
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def threshold(grad, x, limit=0):
    return aten.threshold_backward(grad, x, limit)


def leaky(grad, x, slope=0.2):
    return aten.leaky_relu_backward(grad, x, slope, False)


def trace(fn, inputs) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(fn)(*[mode.from_tensor(t) for t in inputs])


def odd_numbers(length, dtype, seed=0):
    """Numbers with every kind of float among them: both zeros, infinities, NaN, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator, dtype=torch.float64)
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-310, -1e-310, 0.5, 1.0], dtype=torch.float64)
    at = torch.randint(0, 2 * len(odd), (length,), generator=generator)
    return torch.where(at < len(odd), odd[at % len(odd)], x).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(INTS[tensor.element_size()])


def run(fn, inputs) -> tuple[bool, GraphModule, GraphModule]:
    """(changed, before, after), having compared bits, strides and fakes of the results."""
    before, after = trace(fn, inputs), trace(fn, inputs)
    changed = keep_comparisons(after)
    assert not keep_comparisons(after), "a second run finds more"
    results = [module(*[t.clone() for t in inputs]) for module in (before, after)]
    for old, new in zip(*[r if isinstance(r, tuple) else (r,) for r in results], strict=True):
        assert torch.equal(bits(old), bits(new))
        assert (new.dtype, new.stride()) == (old.dtype, old.stride())
    for node in after.graph.nodes:
        if node.op == "call_function":
            inputs_of = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
            with node.meta["val"].fake_mode:
                again = node.target(*inputs_of, **node.kwargs)
            found = node.meta["val"]
            assert isinstance(found, FakeTensor)
            assert (again.shape, again.stride(), again.dtype) == (found.shape, found.stride(), found.dtype)
    return changed, before, after


def targets(module: GraphModule) -> list:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def assert_kept(fn, inputs, kept=1) -> GraphModule:
    changed, _, after = run(fn, inputs)
    assert changed
    assert not set(BACKWARDS) & set(targets(after))
    assert targets(after).count(PACK) == kept
    return after


def assert_left(fn, inputs) -> None:
    changed, before, after = run(fn, inputs)
    assert not changed
    assert str(before.graph) == str(after.graph)


def step(compare, *rest):
    """A forward that computes x and reads it, some way to the backward, and the backward."""

    def fn(z, grad):
        x = z * 1
        grad = grad * x.sum()
        for _ in range(4):
            grad = grad * 1
        return compare(grad, x, *rest)

    return fn


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 33, 100, 4097])  # ATen's scalar loop, vectorised loop, and both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("compare", "rest"),
    [(threshold, [0]), (threshold, [0.5]), (threshold, [-0.0]), (threshold, [math.inf]), (threshold, [-2]),
     (leaky, [0.01]), (leaky, [0.2]), (leaky, [0]), (leaky, [-0.3]), (leaky, [2])],
)  # fmt: skip
def test_the_same_bits(compare, rest, dtype, length):
    def fn(z, grad):
        x = z.clone()  # unlike x * 1 no arithmetic, so that each NaN and subnormal arrives
        for _ in range(4):
            grad = grad.clone()
        return compare(grad, x, *rest)

    assert_kept(fn, [odd_numbers(length, dtype), odd_numbers(length, dtype, 1)])


@pytest.mark.parametrize("compare", [threshold, leaky])
def test_bfloat16(compare):
    """Bits too, but for which NaN a NaN is."""
    z, grad = odd_numbers(4097, torch.bfloat16), odd_numbers(4097, torch.bfloat16, 1)
    before, after = (trace(lambda z, g: compare(g.clone().clone().clone(), z.clone()), [z, grad]) for _ in range(2))
    assert keep_comparisons(after)
    old, new = before(z, grad), after(z, grad)
    assert torch.equal(bits(old.nan_to_num(7)), bits(new.nan_to_num(7))) and torch.equal(old.isnan(), new.isnan())


def test_nan_passes_the_gradient():
    nan = torch.full((40,), math.nan)
    module = trace(step(threshold), [nan, nan])
    assert keep_comparisons(module)
    compared = next(n for n in module.graph.nodes if n.target is aten.le.Scalar)
    assert not compared.target(nan, 0).any()
    threshold_result = module.graph.find_nodes(op="call_function", target=aten.where.self)[0]
    assert threshold_result.args[2].target is aten.mul.Tensor  # the gradient where the comparison is false


@pytest.mark.parametrize(
    ("z", "grad"),
    [
        (torch.randn(6, 4), torch.randn(4, 6).t()),
        (torch.randn(6, 4), torch.randn(1, 4).expand(6, 4)),
        (torch.randn(0, 4), torch.randn(0, 4)),
        (torch.randn(()), torch.randn(())),
    ],
)
@pytest.mark.parametrize("compare", [threshold, leaky])
def test_strides(compare, z, grad):
    def fn(z, grad):
        x = z * 1
        z.sum() + z.mean() - z.sum()  # time goes by
        return compare(grad, x)

    assert_kept(fn, [z, grad])


@pytest.mark.parametrize("compare", [threshold, leaky])
@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t.view(2, 3, 4).permute(2, 0, 1)])
def test_tensors_of_other_strides_are_left(compare, view):
    """Bits come back dense, and where the backward follows the strides of x, `where` would follow those."""

    def fn(z, grad):
        x = view(z * 1)
        return compare(view(grad).exp().exp().exp(), x)

    assert_left(fn, [torch.randn(6, 4), torch.randn(6, 4)])


def test_the_comparison_stands_behind_the_tensor():
    inputs = [torch.randn(5, 4), torch.randn(5, 4)]
    found = targets(assert_kept(step(threshold), inputs))
    assert found[:3] == [aten.mul.Tensor, aten.le.Scalar, PACK]
    assert found[-3:] == [UNPACK, aten.full.default, aten.where.self]


def test_names_the_lines():
    module = trace(step(leaky), [torch.randn(5), torch.randn(5)])
    for node in module.graph.nodes:
        node.meta["stack_trace"] = node.name
    assert keep_comparisons(module)
    lines = {n.target: n.meta["stack_trace"] for n in module.graph.nodes}
    assert lines[aten.gt.Scalar] == lines[PACK] == "mul"
    assert lines[aten.where.self] == "leaky_relu_backward"


def test_one_comparison_for_two_backwards():
    def fn(z, a, b):
        x = z * 1
        a, b = a.exp().exp(), b.exp().exp()
        return threshold(a, x), threshold(b, x)

    assert_kept(fn, [torch.randn(5) for _ in range(3)])


def test_two_limits():
    def fn(z, a, b):
        x = z * 1
        a, b = a.exp().exp(), b.exp().exp()
        return threshold(a, x), leaky(threshold(b, x, 0.5), x)

    assert_kept(fn, [torch.randn(5) for _ in range(3)], kept=3)


def test_a_view_of_the_tensor():
    def fn(z, grad):
        x = (z * 1).view(4, 5)
        return threshold(grad.exp().exp().exp().view(4, 5), x)

    assert_kept(fn, [torch.randn(20), torch.randn(20)])


@pytest.mark.parametrize(
    "fn",
    [
        lambda z, g: (lambda x: (threshold(g * x.sum(), x), x))(z * 1),
        lambda z, g: (lambda x: threshold(g.exp().exp(), x) * x)(z * 1),
        lambda z, g: (lambda x: (threshold(g.exp().exp(), x), x.view(4, 5) * 2))(z * 1),
        lambda z, g: (lambda x: (threshold(g.exp().exp(), x.view(20)), x * 2))(z * 1),
        lambda z, g: (lambda x: threshold(g.exp().exp().exp() * x, x))(z * 1),
        lambda z, g: (lambda x: threshold(x, x))(z * 1),
        lambda z, g: (lambda x: threshold(x.view(20), x))(z * 1),
        lambda z, g: threshold(g.exp().exp(), z),
        lambda z, g: threshold(g.exp().exp().view(4, 5), z.view(4, 5)),
        lambda z, g: threshold(g.exp().exp(), aten.copy_(z, g)),
        lambda z, g: (lambda x: (threshold(g.exp().exp(), x), z.copy_(x))[0])(z * 1),
        lambda z, g: aten.hardtanh_backward(g.exp().exp(), z * 1, -1, 1),
    ],
    ids=[
        "output", "later", "later through a view", "later behind a view", "right before", "its own gradient",
        "its own gradient's view", "input", "view of an input", "input written in place", "written to state",
        "hardtanh",
    ],
)  # fmt: skip
def test_left_alone(fn):
    assert_left(fn, [torch.randn(20), torch.randn(20)])


def test_limits_that_the_type_lacks_are_left():
    halves = [torch.randn(20).half() for _ in range(2)]
    assert_left(step(threshold, 0.1), halves)
    assert_left(step(threshold, math.nan), halves)
    assert_kept(step(threshold, 0.125), halves)


def test_integers_are_left():
    assert_left(lambda z, g: threshold(g * 2 * 3 * 4, z * 1), [torch.arange(-4, 4)] * 2)


def test_without_fakes_nothing_is_known():
    module = trace(step(threshold), [torch.randn(5), torch.randn(5)])
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    assert not keep_comparisons(module)


def test_packing_is_in_the_plan():
    subject = prepare(CASE)
    lowered = pipeline.lowered_step(subject.program, subject.observed, Envelope(), subject._tables(), CPU)
    assert own_ops(lowered)["pack_bits"] == own_ops(lowered)["unpack_bits"] == 2
    assert planned_kernels(lowered)["zg_pack_bits"] == 2


def test_aliases():
    module = trace(lambda a, b: (*a.split(2), *a.sort(), a.view(-1), aten._unsafe_view(b, [-1]), b.copy_(a * 1)), [
        torch.randn(4), torch.randn(4),
    ])  # fmt: skip
    a, b = module.graph.find_nodes(op="placeholder")
    roots = [storage_root(n) for n in next(iter(module.graph.find_nodes(op="output"))).args[0]]
    assert [r if r in (a, b) else None for r in roots] == [a, a, None, None, a, b, b]
    assert viewed(a) is None


# -- through the lowering


def two_layers(x, i, w, u):
    h = torch.relu(x @ w)[i] * 2
    return torch.nn.functional.leaky_relu(h @ u, 0.3)[i].cos()


CASE = Case(
    "two layers",
    backward(two_layers),
    (Rows("n", (4,)), Rows("n", (), torch.int64, 0, "n"), Fixed((4, 3)), Fixed((3, 5))),
    tolerance=1e-5,
)


def test_every_rule_of_a_case_holds_after_the_pass(monkeypatch):
    found = []

    def kept(*args, **options):
        lowered = lower(*args, **options)
        assert set(BACKWARDS[:2]) <= set(targets(lowered.fx_graph))
        assert keep_comparisons(lowered.fx_graph)
        found.extend(targets(lowered.fx_graph))
        return lowered

    monkeypatch.setattr(harness, "lower", kept)
    harness.check_case(CASE)
    assert found.count(PACK) == 2 and not set(BACKWARDS) & set(found)


def test_a_tensor_that_the_gradient_of_a_weight_needs_is_left():
    """Held until right before the backward in any case: the comparison would come on top."""

    def fn(x, w, u):
        return torch.relu(x @ w) @ u

    subject = prepare(Case("plain layers", backward(fn), (Rows("n", (4,)), Fixed((4, 3)), Fixed((3, 5)))))
    lowered = lower(subject.program, subject.bounds, CPU)
    assert BACKWARDS[0] in targets(lowered.fx_graph)
    assert not keep_comparisons(lowered.fx_graph)
