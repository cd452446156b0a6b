"""The table as a whole: every rule is met by a case, and a case fails when the plain op stands in for the rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from zgcompile.passes import lower as lowering
from zgcompile.passes.infer_bounds import infer_bounds
from zgcompile.passes.rules import interpreter
from zgcompile.passes.rules.table import RULES, find_rule, load_rules, rule

from tests.passes.rules import harness
from tests.passes.rules.harness import Case, Fixed, Rows, check_case, trace
from zgcompile.errors import InternalError, UnsupportedOp
from zgcompile.ir.bounds import Observed

HERE = Path(__file__).parent
# Row-wise ops and moves, where the op itself keeps pads apart; their rules are about sizes, refusals and pad states.
PLAIN_IS_RIGHT = {
    "zgcompile.keyed_bits.default", "stack.default", "unbind.int", "split.Tensor", "abs.default", "add.Tensor",
    "add.Scalar", "sub.Tensor", "_to_copy.default", "clone.default", "native_dropout_backward.default",
    "masked_fill.Tensor", "where.self", "threshold_backward.default", "lerp.Tensor", "leaky_relu.default",
    "leaky_relu_backward.default",
    "elu_backward.default", "gelu_backward.default", "sigmoid_backward.default", "tanh_backward.default",
    "softplus_backward.default", "hardtanh_backward.default", "log_sigmoid_forward.default",
    "log_sigmoid_backward.default", "fill.Scalar", "fill.Tensor", "_prelu_kernel.default", "glu.default",
    "glu_backward.default", "_prelu_kernel_backward.default", "hardswish.default", "hardswish_backward.default",
    "hardsigmoid.default", "hardsigmoid_backward.default", "copy.default", "_log_softmax.default",
    "_log_softmax_backward_data.default", "native_layer_norm.default", "native_group_norm.default", "cumsum.default",
    "cumprod.default", "cummax.default", "cummin.default", "logcumsumexp.default", "zeros.default",
    "new_zeros.default", "zeros_like.default", "ones.default", "empty.memory_format", "new_ones.default",
    "new_empty.default", "expand.default", "ones_like.default", "empty_like.default", "empty_strided.default",
    "new_empty_strided.default", "arange.default", "unsqueeze.default", "transpose.int", "t.default",
    "permute.default", "diagonal.default", "tril.default", "triu.default", "squeeze.dim",
}  # fmt: skip
# Without a plain form: they only exist for the compiler.
ENTRANCES = {"zgcompile.dynamic_rows.default", "zgcompile.dynamic_rows_like.default", "_local_scalar_dense.default"}


def cases() -> Iterator[Case]:
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem != Path(__file__).stem:
            yield from getattr(import_module(f"tests.passes.rules.{path.stem}"), "CASES", ())


def plain(context: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
    return node.target(*context.raw(args), **context.raw(kwargs))


def cases_by_rule(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[Case]]:
    met: dict[Any, list[Case]] = defaultdict(list)
    for case in cases():

        def spy(op: Any, case: Case = case) -> Any:
            if case not in met[op]:
                met[op].append(case)
            return find_rule(op)

        monkeypatch.setattr(interpreter, "find_rule", spy)
        subject = harness.prepare(case)
        harness.run_bounded(subject, subject.batches[0], harness.POISONS[0])
    return met


def bites(op: Any, tried: list[Case], monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(interpreter, "find_rule", lambda o: plain if o == op else find_rule(o))
    for case in tried:
        try:
            check_case(case)
        except Exception:
            return True
    return False


@pytest.mark.slow
def test_every_rule_is_met_and_bites(monkeypatch):
    met = cases_by_rule(monkeypatch)
    assert sorted(str(op) for op in load_rules() if not met[op]) == []
    monkeypatch.setattr(harness, "check_static", lambda *_: None)
    rules = {op: str(op).removeprefix("aten.") for op in load_rules()}
    unbitten = {
        name for op, name in rules.items() if name not in ENTRANCES and not bites(op, met[op][:14], monkeypatch)
    }
    assert unbitten == PLAIN_IS_RIGHT


def test_an_op_without_a_rule_is_refused_by_name_and_line():
    program = trace(lambda x: x.kthvalue(2, 0).values, (Rows("n", (4,)),))
    bounds = infer_bounds(program, Observed(), harness.Tight(), {})
    with pytest.raises(UnsupportedOp, match=r"aten\.kthvalue\.default has no rule for a dynamic dimension") as raised:
        lowering.lower(program, bounds, harness.CPU)
    assert raised.value.where.file.endswith("test_table.py")
    assert "kthvalue(2, 0)" in raised.value.where.text


@pytest.mark.parametrize(
    ("fn", "inputs", "message"),
    [
        (lambda x: x.histc(4), (Rows("n"),), "aten.histc"),
        (lambda x: x.median(), (Rows("n"),), "aten.median"),
        (
            lambda x, i, m: x[m, i],
            (Rows("n", (4,)), Fixed((1,), torch.int64, 0, 4), Rows("n", (), torch.bool)),
            "a boolean mask together with other indices",
        ),
        (
            lambda x: torch.nn.functional.layer_norm(x.t(), (x.shape[0],)),
            (Rows("n", (4,)),),
            "layer norm over a dynamic dimension",
        ),
        (
            lambda x: torch.unique_consecutive(x, dim=0),
            (Rows("n", (2,), torch.int64),),
            "unique_consecutive along a dimension",
        ),
        (
            lambda x: torch.unique(x.unsqueeze(1).expand(-1, x.shape[0]), dim=0),
            (Rows("n", (), torch.int64),),
            "unique along a dimension",
        ),
        (
            lambda t, i: (
                torch.nn.functional.embedding(i, t.requires_grad_(), scale_grad_by_freq=True).sum().backward() or t.grad
            ),
            (Fixed((7, 4)), Rows("n", (), torch.int64, 0, 7)),
            "scale_grad_by_freq",
        ),
    ],
)
def test_what_a_rule_refuses(fn, inputs, message):
    program = trace(fn, inputs)
    with pytest.raises(UnsupportedOp, match=message):
        lowering.lower(program, infer_bounds(program, Observed(), harness.Tight(), {}), harness.CPU)


def test_two_rules_for_one_op_are_an_error():
    load_rules()
    with pytest.raises(InternalError, match="two rules"):
        rule("mm.default")(plain)


def test_the_default_rule_is_for_pointwise_ops_only():
    assert find_rule(torch.ops.aten.erfinv.default) is RULES[torch.ops.aten.abs.default]
    assert find_rule(torch.ops.aten.kthvalue.default) is None
