"""Text to FX graph: round trips, results of running what was parsed, and errors with their place."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from zgcompile.passes.canonicalise import Canonicalise

from zgcompile.errors import ZgError
from zgcompile.frontend.arguments import Arguments, length_groups
from zgcompile.frontend.capture import capture
from zgcompile.frontend.shape_env import EnvelopeShapeEnv
from zgcompile.ir.parser import parse_fx_graph
from zgcompile.ir.printer import print_fx_graph

aten = torch.ops.aten
HEAD = """\
fx_graph(length0: i64[], arg0: f32[8, 4], w: f32[4, 2]):
  n0: rows(arg0)
  %0: f32[n0, 4] = zgcompile.dynamic_rows(arg0, length0)
"""


def shape_env() -> ShapeEnv:
    env = EnvelopeShapeEnv()
    env.recording = False
    return env


def parsed(text: str):
    return parse_fx_graph(text, shape_env())[0]


def test_a_captured_step_survives() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, indptr = torch.randn(50, 4), torch.arange(0, 101, 2)

    def step(seeds: torch.Tensor) -> torch.Tensor:
        degree = indptr[seeds + 1] - indptr[seeds]
        rows = torch.repeat_interleave(degree.clamp(max=3))
        nodes, inverse = torch.unique(torch.cat([seeds, seeds[rows]]), return_inverse=True)
        out = model(x[nodes])[inverse[: seeds.numel()]]
        loss = out[out[:, 0] > 0].pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    arguments = Arguments.of((torch.arange(20),), {})
    program = capture(step, arguments, length_groups(arguments.lengths(), [])).program
    for _ in range(2):
        text = print_fx_graph(program)
        assert print_fx_graph(parsed(text)) == text
        assert "seeds: i64[" in text
        assert "param_groups.0.lr: float" in text
        Canonicalise().apply(program)


def test_what_was_parsed_runs() -> None:
    module = parsed(
        HEAD
        + "  %1: bool[n0, 4] = aten.gt.Scalar(%0, 0)\n"
        + "  n1: nonzero(%1)\n"
        + "  %2: i64[n1, 2] = aten.nonzero(%1)\n"
        + "  %3: f32[2] = constant([0.5, 1.5])\n"
        + "  %4: f32[n0, 2] = aten.addmm(%3, %0, w)\n"
        + "  %5: f32[n0] = aten.full([n0], 2*n1 - 1, dtype=f32)\n"
        + "  %6: f32[4, n0] = aten.t(%0)\n"
        + "  w <- %4\n"
        + "  return (%4, %5, n1, max(n0, 3), 7, None)\n"
    )
    x, w = torch.randn(5, 4), torch.randn(4, 2)
    out = module(torch.tensor(5), x, w)
    positive = int((x > 0).sum())
    torch.testing.assert_close(out[0], torch.tensor([0.5, 1.5]) + x @ w)
    torch.testing.assert_close(out[1], torch.full((5,), 2.0 * positive - 1))
    assert out[2:6] == [positive, 5, 7, None]
    assert module.meta["writes"] == [("w", 6)]
    assert out[6] is out[0]


def test_sizes_are_born_where_a_trace_would_bear_them() -> None:
    module = parsed(
        "fx_graph(length0: i64[], arg0: i64[8], hyper0: float):\n"
        "  n0 <= 8: rows(arg0)\n"
        "  %0: i64[n0<=8] = zgcompile.dynamic_rows(arg0, length0)\n"
        "  n1 <= 5: unique(%0) below 64\n"
        "  %1: i64[n1<=5], _: i64[n0<=8], _: i64[0] = aten._unique2(%0)\n"
        "  %2: i64[] = aten.sum(%1)\n"
        "  n2: item(%2)\n"
        "  %3: f32[n0 + n1 <= 13] = aten.zeros([n0 + n1])\n"
        "  %4: f32[n0 + n1 <= 13] = aten.add.Scalar(%3, n2)\n"
        "  %5: f32[n0 + n1 <= 13] = aten.mul(%4, hyper0 ** 2 / 3.0)\n"
        "  %6: f32[n0 + n1 <= 13] = aten.ones([n0 + n1])\n"
        "  require n0 >= 2\n"
        "  require not n0 == n1\n"
        "  return (%5, %6)\n"
    )
    nodes = list(module.graph.nodes)
    born = [(n.target, list(n.meta["unbacked_bindings"])) for n in nodes if n.meta.get("unbacked_bindings")]
    assert [t for t, _ in born] == [
        torch.ops.zgcompile.dynamic_rows.default,
        aten._unique2.default,
        aten._local_scalar_dense.default,
    ]
    symbols = [s for _, (s,) in born]
    assert module.meta["caps"] == {symbols[0]: 8, symbols[1]: 5}
    assert module.meta["ids"] == {next(n.name for n in nodes if n.target is aten._unique2.default): 64}
    assert [(str(type(e).__name__), value) for e, value in module.meta["requires"]] == [
        ("GreaterThan", True),
        ("Equality", False),
    ]
    assert sum(n.target is aten.sym_size.int for n in nodes) == 2, "one node for each size, whatever uses it"
    zeros = next(n for n in nodes if n.target is aten.zeros.default)
    assert zeros.meta["val"].shape[0].node.expr == symbols[0] + symbols[1]


def test_arguments_are_placed_as_in_a_trace() -> None:
    module = parsed(
        HEAD
        + "  %1 = aten.clamp(%0, max=2)\n  %2 = aten.slice(%1, end=n0)\n"
        + "  %3 = aten.sum.dim_IntList(%2, [0], dtype=f64)\n  return (%3)\n"
    )
    by_op = {n.target: n for n in module.graph.nodes}
    assert by_op[aten.clamp.default].args[1:] == (None, 2)
    assert by_op[aten.slice.Tensor].args[1:3] == (0, None)
    assert by_op[aten.sum.dim_IntList].args[1:] == ([0],)
    assert by_op[aten.sum.dim_IntList].kwargs == {"dtype": torch.float64}


def test_equal_sizes_are_one_in_types() -> None:
    text = (
        HEAD
        + "  %1: bool[n0, 4] = aten.gt.Scalar(%0, 0)\n  n1: nonzero(%1)\n  %2: i64[n1, 2] = aten.nonzero(%1)\n"
        + "  %3: bool[n0, 4] = aten.lt.Scalar(%0, 0)\n  n2: nonzero(%3)\n  %4: i64[n2, 2] = aten.nonzero(%3)\n"
        + "  %5: i64[n1, 2] = aten.add(%2, %4)\n  require n1 == n2\n  return (%5, n1, n2)\n"
    )
    # Whether the ShapeEnv replaces n2 by n1 or only notes that they are equal, the text can be read back.
    once = print_fx_graph(parsed(text))
    assert print_fx_graph(parsed(once)) == once


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("  %1 = aten.mmm(%0, w)\n  return ()\n", 4, "column 8: there is no op aten.mmm"),
        ("  %1 = aten.mm.out2(%0, w)\n  return ()\n", 4, "column 8: aten.mm.out2 is not an overload: mm has"),
        ("  %1 = aten.mm(%0, v)\n  return ()\n", 4, "column 20: v is not defined"),
        ("  %1 = aten.mm(%0)\n  return ()\n", 4, "column 8: aten.mm needs the argument mat2"),
        ("  %1 = aten.mm(%0, w, w)\n  return ()\n", 4, "column 8: aten.mm takes 2 arguments by position, not 3"),
        ("  %1 = aten.sum(%0, keep=True)\n  return ()\n", 4, "column 26: aten.sum has no argument keep"),
        ("  %1 = aten.mm(w, w)\n  return ()\n", 4, "column 8: aten.mm.default fails"),
        ("  %1: f32[n0, 4] = aten.mm(%0, w)\n  return (%1)\n", 4, "column 7: %1 is f32[n0, 2]"),
        (
            "  %1 = aten.nonzero(%0)\n  return ()\n",
            4,
            "column 8: aten.nonzero.default makes a size that is not declared",
        ),
        ("  n1: nonzero(%0)\n  %1 = aten.neg(%0)\n  return ()\n", 4, "column 3: no size is born here for n1"),
        (
            "  n1: nonzero(w)\n  %1 = aten.nonzero(%0)\n  return ()\n",
            4,
            "column 3: n1 is born by nonzero(%0), not nonzero(w)",
        ),
        ("  n1: nonzero(%0)\n  return ()\n", 4, "column 3: no op gives birth to n1"),
        ("  n0: rows(arg0)\n  return ()\n", 4, "column 3: n0 is declared twice"),
        ("  %0 = aten.neg(%0)\n  return ()\n", 4, "column 3: %0 is given twice"),
        ("  %1, %2 = aten.neg(%0)\n  return ()\n", 4, "column 3: 1 results are given 2 names"),
        ("  %1 = aten.neg(%0) %0\n  return ()\n", 4, "column 21: expected the end of the line, found '%0'"),
        ("  %1 = aten.neg(%0, $)\n  return ()\n", 4, "column 21: cannot read '$'"),
        ("  %1 = aten.neg(%0\n  return ()\n", 5, "column 3: expected ',', found 'return'"),
        ("  v <- %0\n  return ()\n", 4, "column 3: v is not defined"),
        ("  %1 = aten.neg(%0)\n", 5, "column 1: the text ends without a return"),
        ("  require n0\n  return ()\n", 4, "column 11: expected a comparison of sizes"),
    ],
)
def test_errors_name_line_and_column(body: str, line: int, message: str) -> None:
    with pytest.raises(ZgError) as raised:
        parse_fx_graph(HEAD + body, shape_env(), file="case.ir", first_line=1)
    assert str(raised.value).startswith(f"case.ir:{line}: {message}")


def test_dynamic_inputs_are_refused() -> None:
    with pytest.raises(ZgError, match=r"case\.ir:8: column 17: an input has static sizes"):
        parse_fx_graph("fx_graph(x: f32[n0]):\n  return ()\n", file="case.ir", first_line=8)
