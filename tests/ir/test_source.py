"""The user's line behind frames, tracebacks and printed stacks."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path

import numpy
import pytest
import torch
import torch_geometric

import zgcompile
from zgcompile.ir.source import (
    code_line,
    current_user_line,
    is_user_file,
    user_line_from_stack_trace,
    user_line_from_traceback,
)


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize("module", [torch, torch.nn.functional, torch_geometric, zgcompile, json, os, numpy, pytest])
def test_libraries_are_not_the_users(module):
    assert not is_user_file(module.__file__)


@pytest.mark.parametrize("name", ["", "<string>", "<frozen importlib._bootstrap>", "<eval_with_key>.3"])
def test_generated_code_is_not_the_users(name):
    assert not is_user_file(name)


def test_own_files_are_the_users(tmp_path):
    package = Path(zgcompile.__file__).parent
    assert is_user_file(__file__)
    assert is_user_file(str(tmp_path / "train.py"))
    assert is_user_file("<ipython-input-3-abc>")
    assert is_user_file(str(package / "bench" / "step.py"))
    assert not is_user_file(str(package / "frontend" / "step.py"))
    assert not is_user_file(str(Path(os.path.realpath(zgcompile.__path__[0])) / "errors.py"))


def test_a_pass_is_not_the_users():
    import zgcompile.passes

    assert not is_user_file(zgcompile.passes.__file__)


def test_traceback_stops_at_the_innermost_user_frame():
    def inner():
        return torch.zeros(2).reshape(7)  # MARK reshape

    def outer():
        return functools.reduce(lambda a, b: inner(), [1, 2])

    with pytest.raises(RuntimeError) as caught:
        outer()
    line = user_line_from_traceback(caught.tb)
    assert (line.line, line.function) == (_line_of("MARK re" + "shape"), "inner")
    assert line.text.startswith("return torch.zeros(2).reshape(7)")


def test_traceback_through_a_library_that_raises_in_python():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")  # MARK json
    assert user_line_from_traceback(caught.tb).line == _line_of("MARK js" + "on")
    assert user_line_from_traceback(None) is None


def test_stack_trace_text():
    text = (
        f'  File "{__file__}", line 3, in outer\n    step(x)\n'
        f'  File "{__file__}", line 8, in inner\n    y = x[mask]\n'
        f'  File "{torch.__file__}", line 5, in call\n    return f(x)\n'
    )
    line = user_line_from_stack_trace(text)
    assert (line.line, line.function, line.text) == (8, "inner", "y = x[mask]")
    assert user_line_from_stack_trace(f'File "{torch.__file__}", line 5, in call\n    return f(x)') is None
    assert user_line_from_stack_trace("") is None
    assert user_line_from_stack_trace(None) is None


def test_stack_trace_without_code_lines():
    text = f'  File "{__file__}", line 3, in outer\n  File "{__file__}", line 4, in inner\n'
    line = user_line_from_stack_trace(text)
    assert (line.line, line.function, line.text) == (4, "inner", "")


def test_stack_trace_recorded_by_make_fx(monkeypatch):
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx

    # By itself make_fx keeps only the frames of functions called "forward".
    def keep(tracer, frames):
        return traceback.StackSummary.from_list([f for f in frames if is_user_file(f.filename)])

    def step(x):
        return torch.nn.functional.relu(x) + 1  # MARK relu

    monkeypatch.setattr(PythonKeyTracer, "_filter_traceback_frames", keep)
    traced = make_fx(lambda x: step(x), record_stack_traces=True)(torch.ones(3))
    (relu,) = [n for n in traced.graph.nodes if "relu" in str(n.target)]
    line = user_line_from_stack_trace(relu.meta["stack_trace"])
    assert (line.line, line.function) == (_line_of("MARK re" + "lu"), "step")


def test_paths_are_relative_below_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(Path(__file__).parent)
    assert current_user_line().file == Path(__file__).name
    monkeypatch.chdir(tmp_path)
    assert current_user_line().file == __file__


def test_current_line_skips_library_frames():
    seen = []
    sorted([2, 1], key=lambda _: seen.append(current_user_line()) or 0)  # MARK sorted
    assert {line.line for line in seen} == {_line_of("MARK so" + "rted")}
    assert current_user_line().function == "test_current_line_skips_library_frames"


@functools.lru_cache
@torch.no_grad()
def _decorated(x):  # MARK def
    return x


class _Net(torch.nn.Module):
    def forward(self, x):  # MARK forward
        return x


def test_code_line():
    assert code_line(_decorated).line == _line_of("MARK d" + "ef")
    assert code_line(functools.partial(_decorated, 1)).line == _line_of("MARK d" + "ef")
    assert code_line(_Net()).line == _line_of("MARK for" + "ward")
    assert code_line(_Net().forward).text.startswith("def forward")
    assert code_line(lambda: 0).line == sys._getframe().f_lineno
    with pytest.raises(TypeError, match="no Python source"):
        code_line(len)
