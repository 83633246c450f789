"""Fixtures of the kernel tests: a test that asks for `netns` runs inside that namespace, in a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

_NETNS = pytest.StashKey[support.Netns]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test that has `netns` in that namespace."""
    netns = pyfuncitem.stash.get(_NETNS, None)
    if netns is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    netns.run(lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def netns(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[support.Netns]:
    """A new network namespace, with an xtables lock of its own. The test's body runs in it."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    made = support.Netns()
    request.node.stash[_NETNS] = made
    try:
        made.sh("ip link set lo up")
        yield made
    finally:
        made.close()


@pytest.fixture
def node(netns: support.Netns) -> Iterator[support.Node]:
    """A node with two pods and a peer; the test's body runs on the node."""
    with support.node(netns) as built:
        yield built
