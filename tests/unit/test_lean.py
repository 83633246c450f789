"""Imports that leave out what they would bring along."""

from __future__ import annotations

import subprocess
import sys

import pytest

from netacct.lean import bare_package, hidden


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_hidden_module_cannot_be_imported_meanwhile_only() -> None:
    """Within the block the import fails, and after it the module is there as ever."""
    code = """
from netacct.lean import hidden
with hidden("wsgiref"):
    try:
        import wsgiref
    except ImportError:
        print("hidden")
import wsgiref
print(wsgiref.__name__)
"""

    assert python(code).split() == ["hidden", "wsgiref"]


def test_what_is_loaded_already_is_not_hidden() -> None:
    """A module that somebody uses stays usable."""
    with hidden("subprocess"):
        assert sys.modules["subprocess"] is subprocess


def test_a_bare_package_gives_its_modules_without_itself() -> None:
    """The module works, the package's own `__init__` did not run, and later it can be had whole."""
    code = """
import sys
from netacct.lean import bare_package
with bare_package("pyroute2"):
    from pyroute2.ipset import IPSet
print("pyroute2" in sys.modules, "pyroute2.iproute" in sys.modules, IPSet.__name__)
import pyroute2
print(pyroute2.IPRoute.__name__)
"""

    assert python(code).split() == ["False", "False", "IPSet", "IPRoute"]


def test_a_package_that_is_not_there_says_so_itself() -> None:
    """The import in the block raises what it would raise without it."""
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), bare_package("no_such_package"):
        __import__("no_such_package.part")
