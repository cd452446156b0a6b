from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    """The scripts import each other by bare name, as they do when run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
