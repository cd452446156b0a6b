"""The printed form of FX graphs, pinned by hand-written text."""

from __future__ import annotations

import operator
import re

import pytest
import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Mod

import zgcompile.kernels  # noqa: F401
from zgcompile.ir.parser import parse_fx_graph
from zgcompile.ir.printer import default_overload, print_fx_graph
from zgcompile.ir.size_text import SizeNames
from zgcompile.ir.spans import Span

aten = torch.ops.aten


def traced(function, *shapes: tuple[int, ...]) -> GraphModule:
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake, enable_python_dispatcher():
        inputs = [torch.empty(s) for s in shapes]
        return make_fx(function, tracing_mode="real")(*inputs)


def selected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = x[x.sum(1) > 0]
    return torch.cat([rows, x]) @ w + torch.ones(rows.shape[0] + x.shape[0], 2)


def test_a_traced_function() -> None:
    assert print_fx_graph(traced(selected, (8, 4), (4, 2)), names=["x", "w"]) == (
        "fx_graph(x: f32[8, 4], w: f32[4, 2]):\n"
        "  %0: f32[8] = aten.sum.dim_IntList(x, [1])\n"
        "  %1: bool[8] = aten.gt.Scalar(%0, 0)\n"
        "  n0: mask(%1)\n"
        "  %2: f32[n0, 4] = aten.index(x, [%1])\n"
        "  %3: f32[n0 + 8, 4] = aten.cat([%2, x])\n"
        "  %4: f32[n0 + 8, 2] = aten.mm(%3, w)\n"
        "  %5: f32[n0 + 8, 2] = aten.ones([n0 + 8, 2])\n"
        "  %6: f32[n0 + 8, 2] = aten.add(%4, %5)\n"
        "  return (%6)\n"
    )


def test_names_of_nodes_and_symbols_do_not_show() -> None:
    first, second = (traced(selected, (8, 4), (4, 2)) for _ in range(2))
    for node in second.graph.nodes:
        node._rename(f"other_{node.name}")
    with_symbols = traced(lambda x, w: (x[x[:, 0] > 9].sum() * 0, selected(x, w))[1], (8, 4), (4, 2))
    assert print_fx_graph(first, names=["x", "w"]) == print_fx_graph(second, names=["x", "w"])
    last = print_fx_graph(with_symbols, names=["x", "w"]).splitlines()[-5:]
    assert all("n1" in line for line in last[:-1])  # the second size of that FX graph
    assert not re.search(r"\bu\d+\b|0x", print_fx_graph(with_symbols))


def test_caps_pads_spans_and_lines_show_when_asked() -> None:
    text = (
        "fx_graph(length0: i64[], arg0: i64[8], table: i64[9] span=[0, 5)):\n"
        "  n0 <= 6: rows(arg0)\n"
        "  %0: i64[n0<=6] pad=any = zgcompile.dynamic_rows(arg0, length0)  # train.py:3\n"
        "  n1 <= 4: unique(%0) below 9\n"
        "  %1: i64[n1<=4] pad=zero, %2: i64[n0<=6] span=[0, n1 <= 4), _: i64[0] = "
        "aten._unique2(%0, return_inverse=True)  # train.py:4\n"
        "  %3: i64[n0 + n1 <= 10] span=[-inf, 7) = aten.cat([%0, %1])  # train.py:5\n"
        "  return (%3)\n"
    )
    module, _ = parse_fx_graph(text)
    assert print_fx_graph(module, lines=True, spans=True) == text
    plain = print_fx_graph(module, caps={}, ids={}, pads=False)
    assert plain == (
        "fx_graph(length0: i64[], arg0: i64[8], table: i64[9] span=[0, 5)):\n"
        "  n0: rows(arg0)\n"
        "  %0: i64[n0] = zgcompile.dynamic_rows(arg0, length0)\n"
        "  n1: unique(%0)\n"
        "  %1: i64[n1], %2: i64[n0], _: i64[0] = aten._unique2(%0, return_inverse=True)\n"
        "  %3: i64[n0 + n1] = aten.cat([%0, %1])\n"
        "  return (%3)\n"
    )
    symbols = [s for n in module.graph.nodes for s in n.meta.get("unbacked_bindings") or {}]
    assert "i64[n0 + n1 <= 22]" in print_fx_graph(module, caps=dict(zip(symbols, (20, 2), strict=True)))
    nodes = {n.meta["span"] for n in module.graph.nodes if "span" in n.meta}
    assert Span(0, 5) in nodes


def test_lines_are_the_users() -> None:
    module = traced(selected, (8, 4), (4, 2))
    index = next(n for n in module.graph.nodes if n.target is aten.index.Tensor)
    index.meta["stack_trace"] = (
        f'File "train.py", line 31, in step\n    x[m]\n  File "{torch.__file__}", line 2, in index\n'
    )
    assert "  %2: f32[n0, 4] = aten.index(x_1, [%1])  # train.py:31\n" in print_fx_graph(module, lines=True)
    assert "#" not in print_fx_graph(module)


def test_gated_writes_and_marked_mutations() -> None:
    def step(good: torch.Tensor, w: torch.Tensor, new: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_good = good > 0
        w.copy_(torch.where(is_good, new * 2, w))
        v.copy_(torch.where(is_good, new, new))  # the old value is not kept: no gate
        return is_good

    module = traced(step, (), (3,), (3,), (3,))
    assert print_fx_graph(module, names=["good", "w", "new", "v"]) == (
        "fx_graph(good: f32[], w: f32[3], new: f32[3], v: f32[3]):\n"
        "  %0: bool[] = aten.gt.Scalar(good, 0)\n"
        "  %1: f32[3] = aten.mul(new, 2)\n"
        "  gated(%0) w <- %1\n"
        "  %2: f32[3] = aten.where.self(%0, new, new)\n"
        "  aten.copy_(v!, %2)\n"
        "  return (%0)\n"
    )
    assert print_fx_graph(parse_fx_graph(print_fx_graph(module))[0]) == print_fx_graph(module)


def test_several_results_used_whole() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(aten.max.dim, (x, 0))
    first, again = (graph.call_function(operator.getitem, (both, 0)) for _ in range(2))
    graph.output((first, again))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3, 2)
        both.meta["val"] = aten.max.dim(x.meta["val"], 0)
    first.meta["val"] = again.meta["val"] = both.meta["val"][0]
    text = print_fx_graph(GraphModule(torch.nn.Module(), graph))
    assert text.splitlines()[1:4] == [
        "  %0: (f32[2], i64[2]) = aten.max.dim(x, 0)",
        "  %1: f32[2] = %0[0]",
        "  %2: f32[2] = %0[0]",
    ]
    assert print_fx_graph(parse_fx_graph(text)[0]) == text


def test_other_devices_and_strides_show() -> None:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("key", "x", "t")]
    made = graph.call_function(aten.zeros.default, ([2],), {"device": torch.device("cuda", 0), "pin_memory": False})
    moved = graph.call_function(aten.zeros.default, ([2],), {"device": torch.device("cpu")})
    graph.output([made, moved])
    with FakeTensorMode():
        inputs[0].meta["val"] = torch.empty((), dtype=torch.int64)
        inputs[1].meta["val"] = torch.empty(3, device="cuda:0") if torch.cuda.is_available() else torch.empty(3)
        inputs[2].meta["val"] = torch.empty(3, 2).t()
        made.meta["val"], moved.meta["val"] = torch.empty(2), torch.empty(2)
    if not torch.cuda.is_available():
        assert print_fx_graph(GraphModule(torch.nn.Module(), graph)) == (
            "fx_graph(x: f32[3], t: f32[2, 3] strides=[1, 2]):\n"
            "  %0: f32[2] = aten.zeros([2], device='cuda:0')\n"
            "  %1: f32[2] = aten.zeros([2])\n"
            "  return (%0, %1)\n"
        )


def test_a_wide_header_has_one_input_a_line() -> None:
    graph = Graph()
    names = [f"a_rather_long_parameter_name_{i}" for i in range(5)]
    for name in names:
        with FakeTensorMode():
            graph.placeholder(name).meta["val"] = torch.empty(3)
    graph.output(())
    text = print_fx_graph(GraphModule(torch.nn.Module(), graph))
    assert text.splitlines() == ["fx_graph(", *[f"  {n}: f32[3]," for n in names], "):", "  return ()"]
    assert print_fx_graph(parse_fx_graph(text)[0]) == text


@pytest.mark.parametrize(
    ("op", "overload"),
    [
        ("add", "Tensor"),
        ("mm", "default"),
        ("index", "Tensor"),
        ("clamp", "default"),
        ("select", "int"),
        ("arange", "default"),
    ],
)
def test_overload_left_out(op: str, overload: str) -> None:
    assert default_overload(getattr(aten, op)) == overload


def sizes(*born: sympy.Symbol) -> SizeNames:
    names = SizeNames(Graph(), {}, {})
    names.names = {s: f"n{i}" for i, s in enumerate(born)}
    names.order = {s: i for i, s in enumerate(born)}
    names.first = {s: s for s in born}
    return names


def test_size_expressions_go_by_birth_not_by_symbol_name() -> None:
    a, b = sympy.Symbol("u9", integer=True, positive=True), sympy.Symbol("u10", integer=True, positive=True)
    for first, second in ((a, b), (b, a)):
        names = sizes(first, second)
        assert names.text(first + second + 64) == "n0 + n1 + 64"
        assert names.text(second - 2 * first - 1) == "-2*n0 + n1 - 1"
        assert names.text(sympy.Mul(second, first + 1)) == "(n0 + 1)*n1"
        assert names.text(3 * second * first) == "3*n0*n1"
        assert names.text(Max(second, first, 1)) == "max(n0, n1, 1)"
        assert names.text(FloorDiv(first + 1, 2) + Mod(second, 4)) == "(n0 + 1) // 2 + n1 % 4"
        assert names.text(first**2) == "n0 ** 2"
        assert names.text(sympy.Ge(second, 2, evaluate=False)) == "n1 >= 2"
