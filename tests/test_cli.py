"""`zgcompile run`, as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from zgcompile.passes import lower

import zgcompile
from zgcompile.cli import app

MODULE_LEVEL = """\
import sys
import torch
import torch.nn.functional as F

torch.manual_seed(0)
feat, label = torch.randn(60, 5), torch.arange(60) % 3
weight = torch.randn(5, 3, requires_grad=True)

def train_step(seeds):
    chosen = seeds[torch.rand(seeds.numel()) < 0.8]
    loss = F.cross_entropy(feat[chosen] @ weight, label[chosen])
    loss.backward()
    with torch.no_grad():
        weight.sub_(0.1 * weight.grad)
    weight.grad = None
    return loss.item()
"""
LOOP = """
print("device", len(sys.argv))
for n in (40, 40, 30, 40, 40, 20):
    print(f"loss {train_step(torch.arange(n)):.6f}")
"""
METHOD = """
class Trainer:
    def step(self, seeds):
        return plain(seeds)

train_step = Trainer().step
"""
NESTED = (
    MODULE_LEVEL.replace("def train_step", "def outer():\n  def inner").replace("\n    ", "\n      ")
    + "  return inner\ntrain_step = outer()\n"
    + LOOP
)


@pytest.fixture
def invoke(tmp_path):
    """`invoke(text, *options)` runs that script."""

    def invoke(text, *options):
        script = tmp_path / "script.py"
        script.write_text(text)
        return CliRunner().invoke(app, ["run", str(script), *options])

    return invoke


def cells(text, first, columns=2):
    """The row of that first cell in the table of that many columns: 2 summary, 4 envelope, 5 round trips."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    (row,) = [row for row in rows if row[0] == first and len(row) == columns]
    return row


def test_a_module_level_step(invoke, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    numbers = tmp_path / "numbers.json"
    done = invoke(
        MODULE_LEVEL + LOOP + "sys.exit(0)\n",
        "--warmup",
        "2",
        "--headroom",
        "1.5",
        "--json",
        str(numbers),
        "--",
        "--lr",
        "0.1",
    )
    assert done.exit_code == 0, done.output
    assert "device 3" in done.output
    losses = re.findall(r"loss (\S+)", done.output)
    assert len(losses) == 6
    assert done.output.index(losses[-1]) < done.output.index("host round trips")
    assert cells(done.output, "script.py:10", 5)[2:4] == ["1", "0"]
    assert cells(done.output, "script.py:16", 5)[1:4] == ["item", "1", "0"]
    (step,) = json.loads(numbers.read_text())["steps"]
    assert (step["calls"], step["replays"], step["eager_runs"], step["captures"], step["reads_after"]) == (
        6,
        4,
        2,
        1,
        1,
    )
    assert step["deferred_reads"] == 4
    assert {trip["where"].rpartition(":")[2] for trip in step["round_trips"]} == {"10", "16"}
    assert step["parity_error"] < 1e-4
    assert step["parity_compared"] == 6  # loss, gradient and weight, twice
    assert step["eager"]["runs"] == 3
    assert step["compiled"]["runs"] == 3
    size = next(e for e in step["envelope"] if e["name"].endswith(":10"))
    assert 0 < size["used"] <= size["held"] <= 60


def test_the_scripts_training_is_what_it_would_be_without_the_measuring(invoke, tmp_path, capsys):
    """Eager repetitions and checks leave no trace: the losses are those of the compiled step alone."""
    measured = re.findall(r"loss (\S+)", invoke(MODULE_LEVEL + LOOP, "--warmup", "1").output)
    alone = MODULE_LEVEL + "import zgcompile\ntrain_step = zgcompile.compile(train_step, warmup=1)\n" + LOOP
    path = tmp_path / "alone.py"
    path.write_text(alone)
    exec(compile(alone, str(path), "exec"), {})
    assert measured == re.findall(r"loss (\S+)", capsys.readouterr().out)


def test_a_step_that_is_a_method(invoke):
    text = MODULE_LEVEL.replace("def train_step(", "def plain(") + METHOD + LOOP
    done = invoke(text, "--step", "Trainer.step", "--warmup", "2")
    assert done.exit_code == 0, done.output
    assert cells(done.output, "calls")[1] == "6: 4 replays, 2 at exact sizes"


def test_a_script_may_compile_the_wrapped_step_itself(invoke):
    done = invoke(MODULE_LEVEL + "import zgcompile\ntrain_step = zgcompile.compile(train_step)\n" + LOOP)
    assert done.exit_code == 0, done.output
    assert "train_step: host round trips" in done.output


def test_a_nested_step_of_another_name(invoke):
    done = invoke(NESTED, "--step", "inner", "--warmup", "4")
    assert done.exit_code == 0, done.output
    assert cells(done.output, "calls")[1] == "6: 2 replays, 4 at exact sizes"
    assert "inner: host round trips" in done.output


def test_a_script_too_short_to_replay_is_checked_all_the_same(invoke):
    done = invoke(MODULE_LEVEL + "train_step(torch.arange(30))\n")
    assert done.exit_code == 0, done.output
    assert "not measured: 0 replays in 1 calls" in done.output
    assert cells(done.output, "parity")[1].startswith("largest relative error")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (MODULE_LEVEL, ("--step", "step"), "its functions are: train_step (line 9)"),
        (MODULE_LEVEL, (), "ended without a call of train_step"),
        (MODULE_LEVEL + LOOP, ("--warmup", "0"), "at least one call"),
        (
            MODULE_LEVEL.replace("    loss.backward()", "    if loss > 0: loss = loss * 2\n    loss.backward()") + LOOP,
            (),
            "script.py:12: Python control flow",
        ),
    ],
)
def test_zgcompiles_own_errors_come_without_a_traceback(invoke, text, options, message):
    done = invoke(text, *options)
    assert done.exit_code == 1
    assert message in done.output
    assert "instead: " in done.output
    assert "Traceback" not in done.output
    assert "round trips" not in done.output
    assert "Traceback" in invoke(text, *options, "--traceback").output


def test_what_the_script_raises_is_its_own(invoke):
    done = invoke(MODULE_LEVEL + "def load():\n    raise KeyError('feat')\nload()\n")
    assert done.exit_code == 1
    assert "KeyError: 'feat'" in done.output
    assert "in load" in done.output
    assert "run_script" not in done.output


def test_a_scripts_status_is_kept(invoke):
    assert invoke("import sys\ndef train_step(): pass\nsys.exit(3)\n").exit_code == 3


def test_a_wrong_step_is_reported(invoke, monkeypatch):
    write = lower._write_gated
    monkeypatch.setattr(lower, "_write_gated", lambda good, old, new: write(good, old, new * 1.01))
    done = invoke(MODULE_LEVEL + LOOP, "--warmup", "1")
    assert done.exit_code == 1
    assert "differs from the eager function" in done.output
    assert cells(done.output, "parity")[1].startswith("largest relative error 1.0e-02")


def test_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, zgcompile.__version__)


def test_an_example_as_a_program():
    script = Path(__file__).parents[1] / "examples" / "sage_torch.py"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"COLUMNS": "120"}
    options = [
        "--warmup",
        "1",
        "--",
        "--epochs",
        "1",
        "--hidden",
        "4",
        "--layers",
        "1",
        "--fanout",
        "3",
        "--optimizer",
        "sgd",
    ]
    command = [sys.executable, "-m", "zgcompile.cli", "run", str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert cells(done.stdout, "sage_torch.py:21", 5)[1:4] == ["item", "1", "0"]
    assert cells(done.stdout, "sage_torch.py:32", 5)[1:4] == ["unique", "1", "0"]
    assert cells(done.stdout, "calls")[1] == "3: 2 replays, 1 at exact sizes"


@pytest.mark.gpu
def test_on_a_gpu(invoke):
    text = MODULE_LEVEL.replace("torch.manual_seed", "torch.set_default_device('cuda')\ntorch.manual_seed") + LOOP
    done = invoke(text, "--warmup", "2")
    assert done.exit_code == 0, done.output
    assert "on cuda" in done.output
    assert cells(done.output, "all", 5)[2:4] == ["2", "1"]
    assert cells(done.output, "parity")[1].startswith("largest relative error")
