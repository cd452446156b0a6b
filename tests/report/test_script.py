"""How a user's script is instrumented and run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zgcompile.errors import BadInput
from zgcompile.report.script import as_main, execute, instrumented, own_traceback

SOURCE = '''\
"""The docstring."""
from __future__ import annotations
import functools, sys

def loud(fn):
    @functools.wraps(fn)
    def inner(*args):
        return fn(*args) + ["loud"]
    return inner

@loud
def train_step(x):
    return [x, sys._getframe().f_lineno, __name__]

def make(k):
    def nested(x):
        return [k * x, sys._getframe().f_lineno]
    return nested

class Trainer:
    def train(self, x):
        return x
'''


@pytest.fixture
def script(tmp_path):
    def write(text=SOURCE):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


class Seen:
    """A decorator that notes what it gets and what that returns."""

    def __init__(self):
        self.functions, self.results = [], []

    def __call__(self, fn):
        self.functions.append(fn)

        def run(*args):
            self.results.append(fn(*args))
            return self.results[-1]

        return run


def run(path, step, *args):
    seen = Seen()
    with as_main(path, args) as module:
        status = execute(instrumented(path, step), module, seen)
    return seen, module, status


def test_a_module_level_function_keeps_its_decorators_and_lines(script):
    seen, module, status = run(script(SOURCE + "train_step(3)\n"), "train_step")
    assert status == 0
    assert seen.results == [[3, 13, "__main__", "loud"]]
    assert module.__doc__ == "The docstring."
    assert seen.functions[0].__wrapped__.__code__.co_firstlineno == 11


def test_a_nested_function_is_decorated_in_each_call_of_its_maker(script):
    seen, _, _ = run(script(SOURCE + "a, b = make(2), make(5)\na(1)\nb(1)\na(3)\n"), "nested")
    assert [f.__code__.co_firstlineno for f in seen.functions] == [16, 16]
    assert seen.results == [[2, 17], [5, 17], [6, 17]]


def test_a_method_is_named_with_its_class(script):
    seen, _, _ = run(script(SOURCE + "Trainer.train(None, 7)\n"), "Trainer.train")
    assert seen.results == [7]


def test_an_unknown_name_lists_what_is_there(script):
    with pytest.raises(BadInput) as refused:
        instrumented(script(), "rain_step")
    text = str(refused.value)
    assert "defines no function rain_step" in text
    assert "train_step (line 12)" in text
    assert "make.nested (line 16)" in text
    assert "Trainer.train (line 21)" in text
    assert "imported module" in text
    with pytest.raises(BadInput, match="there is no script"):
        instrumented(Path("nowhere.py"), "step")


def test_the_script_sees_what_python_would_show_it(script, monkeypatch):
    argv, search, main = sys.argv, list(sys.path), sys.modules["__main__"]
    text = "def step(): pass\nimport sys, __main__\n"
    text += "found = [sys.argv, sys.path[0], __file__, __name__, __main__.__file__]\n"
    path = script(text)
    seen, module, _ = run(path, "step", "--lr", "0.1")
    assert module.found == [[str(path), "--lr", "0.1"], str(path.parent), str(path), "__main__", str(path)]
    assert sys.argv is argv
    assert sys.path == search
    assert sys.modules["__main__"] is main
    assert len(seen.functions) == 1


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('bad')", 1), ("pass", 0)]
)
def test_the_status_is_the_scripts_own(script, end, status, capsys):
    assert run(script(f"import sys\ndef step(): pass\n{end}\n"), "step")[2] == status
    assert ("bad" in capsys.readouterr().err) == (end == "sys.exit('bad')")


def test_a_traceback_starts_in_the_script(script):
    path = script("def step(): pass\ndef f():\n    raise ValueError('why')\nf()\n")
    with pytest.raises(ValueError, match="why") as raised:
        run(path, "step")
    text = own_traceback(raised.value, path)
    assert text.startswith("Traceback")
    assert text.count("File ") == 2
    assert f'File "{path}", line 4' in text
    assert f'File "{path}", line 3, in f' in text
    assert text.endswith("ValueError: why\n")
