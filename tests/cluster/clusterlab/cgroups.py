"""The cgroups of a node: its kubelet has a folder of its own in every hierarchy (`cgroupRoot`), there being several.

Made outside of the node, because they outlive its processes, and taken away when those are gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")


def hierarchies() -> list[Path]:
    """The roots of all hierarchies: one with cgroup v2, several with v1."""
    if ROOT.joinpath("cgroup.controllers").exists():
        return [ROOT]
    return sorted(entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.is_symlink())


def make(name: str) -> None:
    """Make the folder `name` in every hierarchy. Raises OSError where it may not be."""
    for root in hierarchies():
        if root == ROOT:
            _delegate(root)
        folder = root / name
        folder.mkdir(exist_ok=True)
        if root.name == "cpuset":  # v1: without these, no process can join
            for file in ("cpuset.cpus", "cpuset.mems"):
                folder.joinpath(file).write_text(root.joinpath(file).read_text(encoding="ascii"), encoding="ascii")
        if root == ROOT:
            _delegate(folder)


def remove(name: str, patience: float = 60.0) -> None:
    """Remove the folder `name` of every hierarchy, with all below it, as soon as their processes have ended."""
    end = time.monotonic() + patience
    while left := [root / name for root in hierarchies() if root.joinpath(name).exists()]:
        for top in left:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)  # noqa: PTH106 -- os.walk gives strings
        left = [top for top in left if top.exists()]
        if left and time.monotonic() > end:
            raise AssertionError(f"cannot be removed: {', '.join(map(str, left))}")
        if left:
            time.sleep(0.05)


def writable() -> str:
    """Why a folder cannot be made in the cgroup tree; "" where it can."""
    probe = f"netacct-probe-{os.getpid()}"
    try:
        roots = hierarchies()
        if not roots:
            return "no cgroup hierarchy is mounted"
        make(probe)
    except OSError as error:
        return f"cgroups are not writable: {error}"
    finally:
        with contextlib.suppress(OSError):
            remove(probe)
    return ""


def _delegate(folder: Path) -> None:
    """v2: let folders below use the controllers that there are."""
    there = set(folder.joinpath("cgroup.controllers").read_text(encoding="ascii").split())
    for controller in _CONTROLLERS:
        if controller in there:
            folder.joinpath("cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
