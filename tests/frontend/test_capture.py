"""The FX graph of a step: what is an input, what is a constant, what is remembered about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zgcompile.errors import CaptureRefused
from zgcompile.frontend.arguments import Arguments, length_groups
from zgcompile.frontend.capture import capture
from zgcompile.ir.source import user_line_from_stack_trace


def captured(fn: Any, *args: Any) -> Any:
    arguments = Arguments.of(args, {})
    return capture(fn, arguments, length_groups(arguments.lengths(), []))


@pytest.fixture(scope="module")
def adam(new_world, batches_of):
    w = new_world()
    w.opt = torch.optim.Adam(w.model.parameters(), lr=0.1, weight_decay=0.2)

    def step(seeds):
        picked = seeds[w.y[seeds] == 1]
        if picked.numel() == 0:
            return None
        w.visits[picked] += 1
        loss = w.loss(picked)
        w.train(loss)
        return loss, picked.numel()

    return captured(step, *batches_of(8)), w


def test_inputs_are_found_and_named(adam):
    program = adam[0].program
    names = {entry.name for entry in program.lifted}
    assert {"w.x", "w.y", "w.visits", "w.model.weight", "w.model.bias"} <= names
    assert {f"w.model.{p}.{k}" for p in ("weight", "bias") for k in ("exp_avg", "exp_avg_sq", "step")} <= names
    assert program.lengths == 1
    assert [a.name for a in program.arguments] == ["'seeds'"]
    written = {program.lifted[w.lifted].name for w in program.state_writes}
    assert written == {n for n in names if "exp_avg" in n or n.endswith((".step", ".weight", ".bias", "visits"))}
    assert {program.lifted[g.lifted].name for g in program.gradient_writes} == {"w.model.weight", "w.model.bias"}


def test_hyperparameters_are_inputs(adam):
    program = adam[0].program
    kinds = {path.split("'")[1] for path in program.hyperparameters}
    assert kinds == {"lr", "betas", "eps", "weight_decay"}
    text = program.fx_graph.code
    assert "0.999" not in text and "0.2" not in text


def test_conditions_are_remembered_with_their_line(adam):
    program = adam[0].program
    assert any(c.where is not None and "picked.numel() == 0" in c.where.text for c in program.conditions)


def test_every_op_knows_its_line(adam):
    program = adam[0].program
    ops = [
        n
        for n in program.fx_graph.graph.nodes
        if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    known = [n for n in ops if user_line_from_stack_trace(n.meta.get("stack_trace") or "")]
    assert len(known) > 0.9 * len(ops)


def test_no_size_of_the_first_batch_is_baked_in(adam):
    text = adam[0].program.fx_graph.code
    for number in (8, 48, 80):
        assert f", {number}," not in text and f"[{number}," not in text and f"[{number}]" not in text


def test_nothing_is_left_behind(adam):
    from torch._subclasses.fake_tensor import FakeTensor

    _, w = adam
    assert w.opt.state == {}
    assert all(p.grad is None and not isinstance(p, FakeTensor) for p in w.model.parameters())
    assert w.opt.param_groups[0]["lr"] == 0.1 and type(w.opt.param_groups[0]["lr"]) is float
    assert w.opt.param_groups[0]["foreach"] is None
    assert w.visits.sum() == 0
    assert "forward" not in vars(w.model)


def test_tensors_that_share_memory(new_world, compare, batches_of):
    """A table and a view of it, only read: two inputs. One of them written: refused, or right."""

    def build() -> Any:
        w = new_world()
        first_rows = w.x[:20]

        def step(seeds):
            loss = w.loss(seeds) + w.model(first_rows[seeds % 20]).sum() * 0.1
            w.train(loss)
            return loss

        return step, w

    compare(build, batches_of(8, 8, 8))

    w = new_world()
    w.flat = w.visits.view(8, 5)

    def step(seeds):
        w.visits[seeds] += 1
        return w.flat.sum(1)

    with pytest.raises(CaptureRefused, match="share"):
        captured(step, *batches_of(8))

    w.half = w.visits[:20]

    def both(seeds):
        w.half[seeds % 20] += 1
        w.visits[seeds] += 2

    with pytest.raises(CaptureRefused, match="share"):
        captured(both, *batches_of(8))


def test_a_parameter_used_twice_is_one_input(new_world, batches_of):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5, bias=False)
            self.b = nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    w = new_world()
    w.model = Tied()

    def step(seeds):
        loss = w.model(w.x[seeds]).pow(2).sum()
        loss.backward()
        return loss

    program = captured(step, *batches_of(8)).program
    assert sum(tuple(e.resolve().shape) == (5, 5) for e in program.lifted if e.kind == "tensor") == 1


def test_two_traces_that_differ_are_refused(new_world, batches_of):
    """A constant that hides from the Python snapshot: it comes from the address of a new object."""
    w = new_world()

    def step(seeds):
        return w.x[seeds] * id(object())

    import itertools

    source = itertools.count(1)

    def counted(seeds):
        return w.x[seeds] * next(source)

    with pytest.raises(CaptureRefused):
        captured(counted, *batches_of(8))
    del step


def test_a_hidden_module_is_traced_with_its_private_copies(new_world, compare, batches_of):
    """`int(size)` in a module that no walk finds: the discovery meets it, and starts again."""

    class Hidden(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * int(x.size(0) + 1)

    def build() -> Any:
        w = new_world()
        model = Hidden(w.model)
        hidden = {"model": model}.__getitem__

        def step(seeds):
            loss = hidden("model")(w.x[seeds]).sum() + w.loss(seeds)
            w.train(loss)
            return loss

        return step, w

    compare(build, batches_of(8, 8, 8, 5), tolerance=1e-4)
