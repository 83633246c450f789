"""Prometheus' own programs: a test that needs one is skipped, and says so, where it is missing."""

from __future__ import annotations

import os

import promlab
import pytest


def _need(name: str) -> str:
    found = promlab.find_tool(name)
    if found is None:
        pytest.skip(f"{name} is missing (make setup unpacks it from Debian's package prometheus)")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool."""
    return _need("promtool")


@pytest.fixture(scope="module")
def prometheus() -> str:
    """The path of prometheus."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    return _need("prometheus")
