"""The demo's own way to make pods by CNI: what it writes where cnitool is missing is what libcni writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from netacct.demo import cni
from netacct.demo.cni import Cni
from netacct.demo.netns import DemoError, Namespace
from netacct.demo.world import ADDRESSES
from netacct.identity import cni_cache
from netacct.model import pack

pytestmark = pytest.mark.kernel


@pytest.fixture
def spaces() -> Iterator[tuple[Namespace, Namespace]]:
    """A node and a pod."""
    made = Namespace("node"), Namespace("pod")
    for space in made:
        space.sysctl("ipv6/conf/default/accept_dad", 0)
    yield made
    for space in made:
        space.close()


def maker(node: Namespace, folder: Path, tool: Path | None) -> Cni:
    """What makes pods."""
    binaries = cni.plugins()
    if binaries is None:
        pytest.skip("no CNI plugins here (Debian package containernetworking-plugins)")
    return Cni(node, folder, binaries, tool)


def test_both_ways_leave_the_same(spaces: tuple[Namespace, Namespace], tmp_path: Path) -> None:
    """By the plugin alone and through cnitool, a pod gets its addresses, and the cache says the same, until DEL."""
    tool = cni.cnitool()
    if tool is None:
        pytest.skip("no cnitool here (tools/setup dev builds it with Go)")
    found = []
    node, pod = spaces
    for number, driver in enumerate((None, tool)):
        folder = tmp_path / str(number)
        made = maker(node, folder, driver)
        made.add("train-0", pod)
        (path,) = (folder / "results").iterdir()
        attachment = cni_cache.decode(path.read_bytes())
        assert attachment is not None
        assert attachment.addresses == tuple(pack(ADDRESSES[family]["train-0"]) for family in (4, 6))
        shown = pod.run(["ip", "addr", "show", "dev", "eth0"])
        assert all(f" {ADDRESSES[family]['train-0']}/" in shown for family in (4, 6))
        found.append(replace(attachment, netns=""))
        made.delete("train-0", pod)
        assert list((folder / "results").iterdir()) == []
    assert found[0] == found[1]


def test_what_a_plugin_complains_of_is_shown(spaces: tuple[Namespace, Namespace], tmp_path: Path) -> None:
    """When ADD fails, the error carries the plugin's own words."""
    node, pod = spaces
    made = maker(node, tmp_path / "cni", None)
    made.add("train-0", pod)
    with pytest.raises(DemoError, match="is not available"):
        made.add("train-0", pod)


def test_without_plugins_cni_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no folder has all the plugins, there are none."""
    monkeypatch.setattr(cni, "PLUGIN_FOLDERS", ("/nonexistent", "/tmp"))  # noqa: S108 -- a folder without plugins
    assert cni.plugins() is None
