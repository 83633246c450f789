"""Fixtures of the kernel tests: a test that asks for `netns` runs inside that namespace, in a thread of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support

from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import Snapshot

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


@pytest.fixture(autouse=True)
def _never_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgot its namespace fails before it leaves rules on this machine."""
    for datapath in (IptablesDatapath, NftablesDatapath):
        monkeypatch.setattr(datapath, "install", _private(datapath.install))


def _private(method: Callable[..., Snapshot]) -> Callable[..., Snapshot]:
    @functools.wraps(method)
    def guarded(*arguments: Any, **options: Any) -> Snapshot:
        assert support.in_private_namespace(), "rules are not installed in the host's own network namespace"
        return method(*arguments, **options)

    return guarded


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
