"""Imports without what they would bring along: the memory of an agent is paid on every node."""

from __future__ import annotations

import contextlib
import importlib.util
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


@contextlib.contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Within the `with` block modules of the package `name` are imported without the package's own `__init__`.

    For packages whose `__init__` imports everything that they have. Does nothing where the package is loaded already,
    or cannot be found (then the import says so).
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        yield
        return
    sys.modules[name] = importlib.util.module_from_spec(spec)  # made, but never executed
    try:
        yield
    finally:
        del sys.modules[name]  # whoever wants the package itself gets it whole
