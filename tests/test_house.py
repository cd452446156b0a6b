"""How the tree is kept: sizes, names, and what csrc may include."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from zgcompile.kernels import registered_kernels

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted(
    path
    for folder in ("zgcompile", "passes", "csrc", "examples", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")
)
KERNELS = sorted(path.stem for path in (ROOT / "csrc").glob("*.cu"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_is_long():
    assert [f"{path.relative_to(ROOT)}: {lines(path)}" for path in CODE if lines(path) > 500] == []


def test_passes_are_short():
    assert median(lines(path) for path in (ROOT / "passes").rglob("*.py") if path.stem != "__init__") < 130


def test_names_say_what_a_file_is_about():
    vague = {"util", "utils", "common", "helper", "helpers", "misc", "tools", "stuff"}
    assert [str(path.relative_to(ROOT)) for path in CODE if set(path.stem.split("_")) & vague] == []


def test_nothing_is_left_undone():
    undone = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    shipped = [path for path in CODE if path.relative_to(ROOT).parts[0] != "tests"]
    assert [str(path.relative_to(ROOT)) for path in shipped if undone.search(path.read_text())] == []


def test_csrc_knows_neither_torch_nor_python():
    for path in CODE:
        if path.relative_to(ROOT).parts[0] == "csrc":
            includes = re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text())
            assert [name for name in includes if re.match(r"(torch|ATen|c10)/", name)] == [], path
            if path.name != "bindings.cpp":
                assert [name for name in includes if "pybind11" in name or name == "Python.h"] == [], path


def test_launchers_name_the_stream():
    """A launch on the default stream is not in the CUDA Graph that is being captured."""
    for path in (ROOT / "csrc").glob("*.cu"):
        launches = re.findall(r"<<<(.*?)>>>", path.read_text(), re.DOTALL)
        assert launches, path
        assert [launch for launch in launches if not re.search(r",\s*0,\s*(call\.)?stream$", launch)] == [], path


@pytest.mark.parametrize("op", KERNELS)
def test_one_name_for_a_kernel(op):
    assert (ROOT / "csrc" / "include" / f"{op}.cuh").exists()
    assert (ROOT / "zgcompile" / "kernels" / f"{op}.py").exists()
    assert (ROOT / "tests" / "kernels" / f"test_{op}.py").exists()
    source = (ROOT / "csrc" / "include" / f"{op}.cuh").read_text()
    functions = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(\w+\)\s+)?(\w+)\(", source)
    assert functions and sorted(functions) == sorted(set(registered_kernels()[op]))
    assert all(name.startswith(f"zg_{op}") for name in functions)


def test_every_registered_kernel_has_its_source():
    assert sorted(op for op, names in registered_kernels().items() if names) == KERNELS
