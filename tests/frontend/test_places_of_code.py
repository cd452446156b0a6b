"""State of what a step imports, of a notebook's classes, and of the compiled step itself."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

import zgcompile
from tests.frontend.rebound import BATCH, FEATURES, assert_followed


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A module `rebound_settings`, and a package without `__init__.py` of which it is part."""
    (tmp_path / "rebound_settings.py").write_text("k = 1.0\n")
    (tmp_path / "rebound_package").mkdir()
    (tmp_path / "rebound_package" / "inner.py").write_text("k = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("rebound_settings"), importlib.import_module("rebound_package.inner")
    for name in ("rebound_settings", "rebound_package", "rebound_package.inner"):
        sys.modules.pop(name)


def test_a_module_that_the_step_imports(settings):
    def step(ids):
        import rebound_settings as s

        return FEATURES[ids] * s.k

    assert_followed(step, lambda: setattr(settings[0], "k", 2.0))


def test_a_name_that_the_step_imports(settings):
    def step(ids):
        from rebound_settings import k

        return FEATURES[ids] * k

    assert_followed(step, lambda: setattr(settings[0], "k", 2.0))


@pytest.mark.parametrize("form", ["import a.b", "from a import b", "named outside"])
def test_a_package_without_init(settings, form):
    package = sys.modules["rebound_package"]

    def imports(ids):
        import rebound_package.inner

        return FEATURES[ids] * rebound_package.inner.k

    def imports_from(ids):
        from rebound_package import inner

        return FEATURES[ids] * inner.k

    steps = {"import a.b": imports, "from a import b": imports_from}
    step = steps.get(form, lambda ids: FEATURES[ids] * package.inner.k)
    assert_followed(step, lambda: setattr(settings[1], "k", 2.0))


NOTEBOOK = """
import torch, zgcompile

class Settings:
    k = 1.0

class Sized:
    n = 1.0

sized = Sized()

def step(x):
    return (x * Settings.k * sized.n).sum()

fn = zgcompile.compile(step, warmup=1)
for n in (4, 5, 4): fn(torch.ones(n))
assert fn.stats.replays
Settings.k = 100.0
assert float(fn(torch.ones(4))) == 400
sized.n = 2.0
assert float(fn(torch.ones(4))) == 800
"""


def test_a_class_without_functions_in_python_c(tmp_path):
    subprocess.run([sys.executable, "-c", NOTEBOOK], check=True, timeout=300, cwd=tmp_path)  # not the source tree


def test_a_class_without_functions_in_exec():
    exec(compile(NOTEBOOK, "<cell 8>", "exec"), {"__name__": "a cell"})


def compiled(start):
    if start is None:

        @zgcompile.compile(warmup=1)
        def step(ids):
            return FEATURES[ids] * (step.k if hasattr(step, "k") else 1.0)

    else:

        @zgcompile.compile(warmup=1)
        def step(ids):
            return FEATURES[ids] * step.k

        step.k = start
    return step


@pytest.mark.parametrize("start", [None, 1.0])
def test_an_attribute_of_the_compiled_step_itself(start):
    step = compiled(start)
    for _ in range(4):
        assert torch.equal(step(BATCH), FEATURES[BATCH])
    assert step.stats.replays >= 2
    step.k = 2.0
    assert torch.equal(step(BATCH), FEATURES[BATCH] * 2)
    assert step.stats.traces == 2
    replays = step.stats.replays
    step.note = 1  # nobody reads it
    for _ in range(3):
        assert torch.equal(step(BATCH), FEATURES[BATCH] * 2)
    assert step.stats.traces == 2
    assert step.stats.replays > replays
