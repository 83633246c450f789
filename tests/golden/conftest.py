"""Golden files: what the program wrote when somebody last looked at it and found it right.

`pytest tests/golden --update-golden` writes them anew; `git diff` then shows what changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that accepts what the program writes now."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, bytes], None]:
    """Compares bytes with the golden file of that name, or writes it where asked to."""

    def compare(name: str, found: bytes) -> None:
        path = HERE / name
        # The option is unknown where pytest was started on another directory first.
        if request.config.getoption("--update-golden", default=False):
            path.write_bytes(found)
        assert found.decode() == path.read_bytes().decode()

    return compare
