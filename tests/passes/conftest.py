"""`--accept` for golden cases, and the runner that they share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # tests/golden.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the `after` parts of the golden cases")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--accept", default=False) and os.environ.get("CI"):
        raise pytest.UsageError("--accept is refused where CI is set: expectations are reviewed, not produced, there")


@pytest.fixture
def accepting(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--accept", default=False))
