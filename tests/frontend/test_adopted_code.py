"""Where the step is, is the user's code: also installed, given to `python -c`, or made by `exec`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

import zgcompile
from zgcompile.errors import PythonStateChanged
from zgcompile.ir import source

SOURCE = """
import torch

scale, calls = 1.0, []

def scaled(x):
    return x * scale

def step(x):
    return scaled(x).sum()

def counting(x):
    calls.append(1)
    return x.sum()
"""


@pytest.fixture(autouse=True)
def adopted(monkeypatch):
    """What a test adopts is forgotten behind it."""
    monkeypatch.setattr(source, "_adopted", set())
    yield
    for clear in source._caches:
        clear()


@pytest.fixture(params=["installed", "a module that is installed", "exec"])
def workload(request, tmp_path, monkeypatch):
    """The globals of code that no rule on file names takes as the user's."""
    if request.param == "exec":
        namespace = {"__name__": "cell"}
        exec(compile(SOURCE, "<cell 7>", "exec"), namespace)
        yield namespace
        return
    place = tmp_path / "site-packages"
    name = "adopted_package" if request.param == "installed" else "adopted_module"
    file = place / name / "steps.py" if request.param == "installed" else place / f"{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(place))
    imported = f"{name}.steps" if request.param == "installed" else name
    yield vars(importlib.import_module(imported))
    sys.modules.pop(imported)


def test_its_globals_are_guards(workload):
    fn = zgcompile.compile(workload["step"], warmup=1)
    for n in (4, 5, 4):
        assert float(fn(torch.ones(n))) == n
    workload["scale"] = 100.0
    assert float(fn(torch.ones(4))) == 400
    workload["scaled"] = lambda x: x - 1
    assert float(fn(torch.ones(4))) == 0


def test_its_state_must_not_change(workload):
    with pytest.raises(PythonStateChanged, match="calls"):
        zgcompile.compile(workload["counting"], warmup=1)(torch.ones(4))
    assert workload["calls"] == []


def test_another_package_stays_a_library(workload):
    zgcompile.compile(workload["step"], warmup=1)
    assert not source.is_user_file(torch.__file__)
    assert not source.is_user_file(pytest.__file__)
    assert not source.is_user_file("<frozen importlib._bootstrap>")


@pytest.mark.parametrize("fn", [torch.nn.Linear(2, 2), importlib.import_module, torch.sum])
def test_a_library_is_not_adopted(fn):
    source.adopt(fn)
    assert source._adopted == set()


def test_python_c(tmp_path):
    program = SOURCE + (
        "import zgcompile\n"
        "fn = zgcompile.compile(step, warmup=1)\n"
        "for n in (4, 5, 4): fn(torch.ones(n))\n"
        "scale = 100.0\n"
        "assert float(fn(torch.ones(4))) == 400\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=tmp_path)  # not the source tree
