"""Imports without what they would bring along: the memory of an agent is paid on every node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """Within the `with` block an import of `name` raises ImportError, unless it was imported before.

    Documented behaviour of None in sys.modules (The import system, "The module cache"). For libraries that do without
    where they must.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # documented, but not in the stubs
    try:
        yield
    finally:
        del sys.modules[name]
