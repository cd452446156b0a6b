"""Who may import whom, read from the syntax tree of every file, imports inside functions and TYPE_CHECKING included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A unit is a module or subpackage right under zgcompile; "zgcompile" is zgcompile/__init__.py. Nothing imports cli.
UNITS = {
    "_native", "backend", "codemod", "errors", "frontend", "ir", "kernels", "loader", "pass_base", "passes", "pipeline",
    "report", "testing", "zgcompile",
}  # fmt: skip
# Unit -> the units it may import, besides itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "keyed_numbers": {"errors"},
    "ir": {"keyed_numbers", "errors"},
    "pass_base": {"ir", "errors"},
    "passes": {"ir", "pass_base", "errors"},
    "kernels": {"_native", "keyed_numbers", "errors"},
    "backend": {"kernels", "ir", "keyed_numbers", "errors"},
    "pipeline": {"passes", "pass_base", "ir", "errors"},
    "frontend": {"pipeline", "backend", "ir", "keyed_numbers", "errors"},
    "loader": {"kernels", "frontend", "errors"},
    "report": {"frontend", "ir", "errors"},
    "codemod": {"report", "errors"},
    "testing": UNITS | {"keyed_numbers"},
    "bench": UNITS | {"keyed_numbers"},
    "cli": UNITS | {"bench"},
    "zgcompile": UNITS - {"testing"},
}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the file of `package` imports, relative names resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def module_of(path: Path, root: Path) -> str:
    """The import name of a file of the tree: passes/ is zgcompile.passes."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] == "passes":
        parts = ("zgcompile", *parts)
    return ".".join(parts)


def unit_of(name: str, units: set[str]) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in units else "zgcompile"


def violations(root: Path) -> list[str]:
    files = sorted([*(root / "zgcompile").rglob("*.py"), *(root / "passes").rglob("*.py")])
    units = {"passes", "_native"} | {path.stem for path in (root / "zgcompile").iterdir() if path.name[0] not in "._"}
    found = []
    for path in files:
        module = module_of(path, root)
        package = module.rpartition(".")[0]
        unit = unit_of(module, units)
        for line, name in imported(ast.parse(path.read_text()), package):
            where = f"{path.relative_to(root)}:{line}"
            if name.split(".")[0] == "passes":
                found.append(f"{where}: import {name} as zgcompile.{name}")
            if unit == "kernels" and name.startswith("torch.fx"):
                found.append(f"{where}: kernels know no fx, but import {name}")
            if name.split(".")[0] != "zgcompile":
                continue
            target = unit_of(name, units)
            if target != unit and target not in ALLOWED.get(unit, set()):
                found.append(f"{where}: {unit} must not import {target} ({name})")
            if unit == target == "passes" and not pass_may_import(module, name):
                found.append(f"{where}: a pass must not import another ({name})")
            if module.startswith("zgcompile.passes.rules.") and target == "pass_base":
                found.append(f"{where}: rules know bounded tensors, not passes ({name})")
    return found


def pass_may_import(module: str, name: str) -> bool:
    """Within passes: anything of passes/rules, and what a file has itself; passes/__init__.py may name every pass."""
    return name.startswith("zgcompile.passes.rules") or module == "zgcompile.passes.__init__"


def test_import_rules():
    assert violations(ROOT) == []


def test_every_unit_has_a_rule():
    """A new folder needs a line in the table before it may import anything."""
    names = {
        path.stem for path in (ROOT / "zgcompile").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert names - {"__init__", "__main__"} <= set(ALLOWED)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("zgcompile/ir/a.py", "from zgcompile.kernels import compact", "ir must not import kernels"),
        ("zgcompile/ir/a.py", "def f():\n    import zgcompile.pipeline", "ir must not import pipeline"),
        ("zgcompile/ir/a.py", "import importlib\nimportlib.import_module('zgcompile.cli')", "ir must not import cli"),
        ("zgcompile/ir/a.py", "from zgcompile import compile", "ir must not import zgcompile"),
        ("zgcompile/ir/a.py", "from .. import kernels", "ir must not import kernels"),
        ("zgcompile/bench/a.py", "import zgcompile.cli", "bench must not import cli"),
        ("zgcompile/testing.py", "import zgcompile.bench.x", "testing must not import bench"),
        ("zgcompile/kernels/a.py", "from torch.fx import Graph", "kernels know no fx"),
        ("zgcompile/kernels/a.py", "from torch import fx", "kernels know no fx"),
        ("zgcompile/new/a.py", "import zgcompile.errors", "new must not import errors"),
        ("passes/a.py", "from zgcompile.passes.b import B", "a pass must not import another"),
        ("passes/a.py", "from zgcompile.backend import x", "passes must not import backend"),
        ("passes/a.py", "import passes.b", "import passes.b as zgcompile.passes.b"),
        ("passes/rules/a.py", "from zgcompile.passes.b import B", "a pass must not import another"),
        ("passes/rules/a.py", "from zgcompile.pass_base import Pass", "rules know bounded tensors"),
    ],
)
def test_a_violation_is_found(tmp_path, file, text, message):
    for name in ("backend", "bench", "ir", "kernels", "new"):
        (tmp_path / "zgcompile" / name).mkdir(parents=True)
    for name in ("cli.py", "errors.py", "pass_base.py", "pipeline.py", "testing.py"):
        (tmp_path / "zgcompile" / name).touch()
    (tmp_path / "passes" / "rules").mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1, found
    assert message in found[0]


def test_allowed_imports_pass(tmp_path):
    for name in ("ir", "kernels"):
        (tmp_path / "zgcompile" / name).mkdir(parents=True)
    for name in ("errors.py", "pass_base.py", "pipeline.py"):
        (tmp_path / "zgcompile" / name).touch()
    (tmp_path / "passes" / "rules").mkdir(parents=True)
    (tmp_path / "passes" / "a.py").write_text(
        "import torch\nfrom zgcompile.errors import E\nfrom zgcompile.ir.x import X\n"
        "from zgcompile.pass_base import Pass\nfrom zgcompile.passes.rules.b import rule\n"
    )
    (tmp_path / "passes" / "rules" / "b.py").write_text("from zgcompile.passes.rules.c import rule\n")
    (tmp_path / "zgcompile" / "pipeline.py").write_text("from zgcompile.passes.a import A\n")
    assert violations(tmp_path) == []
