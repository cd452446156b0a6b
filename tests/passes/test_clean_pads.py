"""A value that is read cleaned is made clean: one buffer for the forward pass and the weight gradient."""

from __future__ import annotations

import pytest
import torch
from zgcompile.passes.clean_pads import clean_pads
from zgcompile.passes.lower import lower
from zgcompile.passes.rules.interpreter import Lowering

from tests.passes.rules.harness import CPU, POISONS, Case, Fixed, Rows, group_caps, prepare

aten = torch.ops.aten
ROWS, WEIGHT = Rows("n", (6,)), Fixed((6, 3))


def linear_and_its_gradient(x, w):
    """A matrix product over rows, and one that contracts them, both of one computed value."""
    h = x.exp()
    out = h @ w
    return out, h.t() @ out.tanh()


CASE = Case("linear", linear_and_its_gradient, (ROWS, WEIGHT))


def selects(fx_graph):
    return [n for n in fx_graph.graph.nodes if n.target is aten.where.self and n.meta["val"].dim() == 2]


@pytest.fixture(scope="module")
def subject():
    return prepare(CASE)


def test_the_value_behind_the_transpose_is_the_one_that_is_cleaned(subject):
    names = {name for name, _ in clean_pads(subject.program, subject.bounds, CPU)}
    targets = {n.target for n in subject.program.fx_graph.graph.nodes if n.name in names}
    assert targets == {aten.exp.default, aten.tanh.default}


def test_each_cleaned_value_has_one_buffer(subject):
    before = lower(subject.program, subject.bounds, CPU).fx_graph
    clean = clean_pads(subject.program, subject.bounds, CPU)
    after = lower(subject.program, subject.bounds, CPU, clean=clean).fx_graph
    for fx_graph, readers_of_exp in ((before, 2), (after, 1)):
        (exp,) = [n for n in fx_graph.graph.nodes if n.target is aten.exp.default]
        assert len(exp.users) == readers_of_exp  # the select alone, or the select and the forward product
    assert len(selects(after)) == len(selects(before)) == 2


def test_pads_of_the_cleaned_are_zero(subject):
    batch = subject.batches[1]
    clean = clean_pads(subject.program, subject.bounds, CPU)
    lowering = Lowering(subject.program, subject.bounds, CPU, None, clean)
    assert clean and all(isinstance(place, tuple) for place in clean)
    with torch.no_grad():
        lowering.run_flat(batch.padded(group_caps(subject), POISONS[0]))
    cleaned = [value for value, node, position in lowering.born if (node.name, position) in clean]
    assert cleaned
    for value in cleaned:
        mask = lowering.context.all_valid(value)
        assert torch.where(mask, 0.0, value.data).eq(0).all()
