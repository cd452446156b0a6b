"""The last check before capture: one FX graph for each thing that may not be in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from zgcompile.passes.lower import lower
from zgcompile.passes.verify_capturable import verify_capturable

from tests.passes.rules.harness import CPU, Case, Rows, prepare, trace
from zgcompile.errors import InternalError


def static(fn, *shapes, dtype=torch.float32):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return SimpleNamespace(fx_graph=make_fx(fn)(*[torch.zeros(s).to(dtype) for s in shapes]))


@pytest.mark.parametrize(
    ("fn", "shapes", "message"),
    [
        (lambda x: torch.rand_like(x), [(3,)], "draws random numbers that are not keyed"),
        (lambda x: torch.dropout(x, 0.5, True), [(3,)], "draws random numbers"),
        (lambda x: x.index_put((x > 0,), torch.zeros(())), [(3,)], "has a boolean index"),
        (lambda x: torch.repeat_interleave(x.long(), output_size=4), [(3,)], "reads a value back to the host"),
    ],
)
def test_refused(fn, shapes, message):
    with pytest.raises(InternalError, match=message):
        verify_capturable(static(fn, *shapes), CPU)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[x > 0],
        lambda x: torch.unique(x.round()),
        lambda x: x * x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x + 1,
    ],
)
def test_a_dynamic_fx_graph_is_refused(fn):
    with pytest.raises(InternalError, match="cannot be captured"):
        verify_capturable(SimpleNamespace(fx_graph=trace(fn, (Rows("n"),)).fx_graph), CPU)


def test_another_device_is_refused():
    with pytest.raises(InternalError, match="is on cpu, the step on meta"):
        verify_capturable(static(lambda x: x + 1, (3,)), torch.device("meta"))


def test_the_message_names_the_line():
    program = trace(lambda x: (x > 0).nonzero(), (Rows("n"),))
    for node in program.fx_graph.graph.nodes:
        if node.target is not torch.ops.aten.nonzero.default:
            node.meta.pop("val", None)
    with pytest.raises(InternalError) as raised:
        verify_capturable(SimpleNamespace(fx_graph=program.fx_graph), CPU)
    assert raised.value.where.text == 'program = trace(lambda x: (x > 0).nonzero(), (Rows("n"),))'


def test_what_the_lowering_makes_passes():
    subject = prepare(Case("mask", lambda x: torch.unique(x[x > 0].round()).sum(), (Rows("n"),)))
    verify_capturable(lower(subject.program, subject.bounds, CPU), CPU)
    verify_capturable(static(lambda x: x.exp().index_select(0, torch.zeros(2, dtype=torch.int64)), (3,)), CPU)
