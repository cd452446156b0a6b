"""Options and skips of the whole suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the repository root first on the path, where the folder zgcompile/ hides the installed package
# but lacks zgcompile.passes and zgcompile._native. Tests see what is installed.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = []
    if not torch.cuda.is_available():
        skips.append(("gpu", pytest.mark.skip(reason="needs a CUDA device")))
    if not config.getoption("--slow"):
        skips.append(("slow", pytest.mark.skip(reason="needs --slow")))
    for item in items:
        for name, skip in skips:
            if item.get_closest_marker(name) is not None:
                item.add_marker(skip)
