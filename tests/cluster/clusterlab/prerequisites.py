"""What a machine must have for a cluster, and the reason where it lacks something."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from clusterlab import cgroups
from clusterlab.node import PLUGINS
from netacct.inotify import Inotify

ROOT = Path(__file__).resolve().parents[3]
_SYSTEM = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_TOOLS = (
    "runc",
    "openssl",
    "nft",
    "iptables",
    "ip6tables",
    "ip",
    "sysctl",
    "unshare",
    "nsenter",
    "cc",
    "mount",
    "bash",
)
_PLUGINS = ("ptp", "host-local", "portmap", "loopback")
_BUSYBOX = Path("/bin/busybox")
_INOTIFY = 50
"""What two nodes with agents have."""


class MissingError(Exception):
    """Something that only other machines have; says what."""


def programs() -> Path:
    """The folder of the built programs (tools/cluster-programs). Raises MissingError where they are not built."""
    done = subprocess.run(
        [str(ROOT / "tools/cluster-programs"), "--built"], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise MissingError(done.stderr.strip().splitlines()[-1])
    return Path(done.stdout.strip())


def require() -> Path:
    """The folder of the built programs. Raises MissingError where a cluster cannot run here."""
    if os.geteuid():
        raise MissingError("a cluster needs root")
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=_SYSTEM) is None]
    lacking += [plugin for plugin in _PLUGINS if not Path(PLUGINS, plugin).exists()]
    if not _BUSYBOX.exists() or b"/ld-linux" in _BUSYBOX.read_bytes()[:4096]:
        lacking.append("a static /bin/busybox")
    if lacking:
        raise MissingError(f"{', '.join(lacking)} missing (tools/setup cluster installs what Debian has)")
    done = subprocess.run(["unshare", "-nmpf", "true"], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise MissingError(f"namespaces cannot be made: {done.stderr.strip()}")
    if fault := cgroups.writable():
        raise MissingError(fault)
    if not _has_inotify():
        raise MissingError(f"fewer than {_INOTIFY} instances of inotify left: sysctl fs.inotify.max_user_instances=512")
    return programs()


def _has_inotify() -> bool:
    """Whether a cluster gets its instances of inotify; Debian's limit is 128 for all processes of root."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(_INOTIFY):
                stack.callback(Inotify().close)
        except OSError:
            return False
    return True
