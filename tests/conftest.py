"""What holds for all tests: Hypothesis gives up on no machine for being slow, and logging is nobody's heritage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    """Leave structlog and the standard library's root logger as they were: the next test may read what is logged."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if structlog.is_configured():
        root.handlers[:], root.level = handlers, level
        structlog.reset_defaults()
