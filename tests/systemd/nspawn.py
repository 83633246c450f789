"""A Debian machine that boots under systemd-nspawn, and vanishes with this process, however that ends.

Everything that could stay behind lives in namespaces of the container's own: mounts (the root is an overlay), processes
(SIGKILL to the first one ends all), and the network. Only two empty cgroups are outside, and removed in the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_BOOT = 180.0
_COMMAND = 300.0
PRIVATE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""In front of a command: it has mounts and processes of its own, which all end with this process."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRON = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"}
_NUMBERS = itertools.count()

# systemd-nspawn without a unit of its own ends with 133 when the container wants to be booted again.
_RUN = """\
set -e
for group in $GROUPS_TO_JOIN; do echo 0 > $group/cgroup.procs; done
mount -t tmpfs none /run
mount -t overlay none -o "lowerdir=$LOWER,upperdir=$FOLDER/upper,workdir=$FOLDER/work" $FOLDER/root
while :; do
  code=0
  systemd-nspawn --quiet --register=no --keep-unit --boot --private-network --console=pipe --resolv-conf=off \\
    --timezone=off --link-journal=no --directory=$FOLDER/root --machine=$NAME --bind-ro=$SHARED:/src || code=$?
  [ $code = 133 ] || exit $code
done
"""


class Machine:
    """One container.

    Args:
        folder: an empty folder for what the container writes; `upper` in it is what became different from `lower`.
        lower: folders that make its root, the uppermost first.
        shared: a folder that it sees, read-only, as /src.
    """

    def __init__(self, folder: Path, lower: Sequence[Path], shared: Path) -> None:
        self._name = f"netacct-{os.getpid()}-{next(_NUMBERS)}"
        self._folder = folder
        self._lower, self._shared = lower, shared
        self._groups = [folder / self._name for folder in _cgroups()]
        self._outer: subprocess.Popen[bytes] | None = None
        self.leader = 0
        for name in ("upper", "work", "root"):
            (folder / name).mkdir()

    @property
    def upper(self) -> Path:
        """What differs from the folders below, as overlayfs keeps it. To be written to only before `boot`."""
        return self._folder / "upper"

    def boot(self) -> None:
        """Start it and wait until all its units are up."""
        for group in self._groups:
            _sweep(group.parent)
            group.mkdir()
        environ = {
            "PATH": _PATH,
            "LOWER": ":".join(map(str, self._lower)),
            "FOLDER": str(self._folder),
            "NAME": self._name,
            "SHARED": str(self._shared),
            "GROUPS_TO_JOIN": " ".join(map(str, self._groups)),
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",  # as nodes have it nowadays, also where this host is older
        }
        with self._console.open("ab") as console:
            self._outer = subprocess.Popen(
                [*PRIVATE, "sh", "-c", _RUN],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environ,
            )
        self.wait_for_boot(0)

    def reboot(self) -> None:
        """Boot it again, as an administrator does."""
        before = self.leader
        self.run("systemctl reboot")
        self.wait_for_boot(before)

    def power_off(self) -> None:
        """Shut it down in good order, so that all is in `upper`."""
        assert self._outer is not None
        self.run("systemctl poweroff")
        self._outer.wait(_BOOT)
        self.close()

    def close(self) -> None:
        """Kill what still runs, and let go of everything."""
        if self._outer is not None:
            first = _children(self._outer.pid)
            self._outer.kill()  # and so, by unshare --kill-child, all the rest
            self._outer.wait(60)
            _gone(first)
        for group in self._groups:
            _remove_cgroup(group)

    def run(self, command: str, *, check: bool = True) -> str:
        """Run a shell command inside and return its output (both streams); fails where it fails, unless told not to."""
        done = subprocess.run(
            self._enter(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_COMMAND,
            env=_ENVIRON,
        )
        assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout.strip()

    def spawn(self, command: str) -> subprocess.Popen[bytes]:
        """Start a shell command inside without waiting for it."""
        quiet = subprocess.DEVNULL
        return subprocess.Popen(self._enter(command), stdin=quiet, stdout=quiet, stderr=quiet, env=_ENVIRON)

    def _enter(self, command: str) -> list[str]:
        return ["nsenter", "--target", str(self.leader), "--all", "--", "sh", "-c", command]

    def path(self, inside: str) -> Path:
        """Where one of its files is to be found from outside, while it runs."""
        return Path(f"/proc/{self.leader}/root", inside.lstrip("/"))

    @property
    def _console(self) -> Path:
        return self._folder / "console"

    def wait_for_boot(self, before: int) -> None:
        """Wait for a first process other than `before`, and for its system to be up, be it with failed units."""
        end = time.monotonic() + _BOOT
        while True:
            assert self._outer is not None
            assert self._outer.poll() is None, self._console.read_text(errors="replace")
            self.leader = _leader(self._outer.pid)
            if self.leader not in (0, before):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if self.run("systemctl is-system-running", check=False) in ("running", "degraded"):
                        return
            assert time.monotonic() < end, self._console.read_text(errors="replace")
            time.sleep(0.1)


def _cgroups() -> Iterator[Path]:
    """The folders of this process in the hierarchies that systemd-nspawn manages: systemd's own, and version 2."""
    mounted = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup2":
            mounted[""] = head.split()[4]
        elif "name=systemd" in options.split(","):
            mounted["name=systemd"] = head.split()[4]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, hierarchy, folder = line.split(":", 2)
        if hierarchy in mounted:
            yield Path(mounted[hierarchy], folder.lstrip("/"))


def _sweep(folder: Path) -> None:
    """Remove the cgroups of earlier runs that were killed."""
    for group in folder.glob("netacct-*-*"):
        if not Path("/proc", group.name.split("-")[1]).exists():
            _remove_cgroup(group)


def _remove_cgroup(group: Path) -> None:
    """Remove a cgroup with everything below it; those of processes that are just ending are busy for a moment."""
    end = time.monotonic() + 60
    while group.exists():
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            assert time.monotonic() < end, f"{group} stays busy"
            time.sleep(0.05)


def _leader(outer: int) -> int:
    """The first process of the container: a child of systemd-nspawn that is systemd by now. 0 where there is none."""
    for first in _children(outer):
        for nspawn in _children(first):
            for leader in _children(nspawn):
                if _command(nspawn) == "systemd-nspawn" and _command(leader) == "systemd":
                    return leader
    return 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""


def _gone(pids: Sequence[int]) -> None:
    """Wait until processes have ended: the kernel takes their namespaces apart meanwhile."""
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"{pids} did not end"
        time.sleep(0.02)


@contextlib.contextmanager
def machine(folder: Path, lower: Sequence[Path], shared: Path) -> Iterator[Machine]:
    """A machine for the length of a `with` block, not yet booted; what it wrote is deleted afterwards."""
    made = Machine(folder, lower, shared)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)
