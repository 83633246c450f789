"""docs/dashboards.md tells the truth about increase()."""

from __future__ import annotations

import subprocess
import sys

import promlab
import pytest

MISSING = promlab.missing("prometheus", "promtool")
pytestmark = [pytest.mark.kernel, pytest.mark.prometheus, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def test_docs_say_what_is_measured() -> None:
    """Every line that the extrapolation bench prints stands in the documentation of the boards."""
    command = [sys.executable, str(promlab.ROOT / "tests" / "bench" / "extrapolation.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    documented = (promlab.ROOT / "docs" / "dashboards.md").read_text().splitlines()

    assert printed.count("|") > 50
    assert [line for line in printed.splitlines() if line not in documented] == []
