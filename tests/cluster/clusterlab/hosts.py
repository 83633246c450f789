"""A host of the cluster: a network, a mount and a pid namespace, held by the first process of the pid namespace.

That process reads from a pipe which the harness holds: when the harness ends, however it ends, it reads the end of the
file and leaves, the kernel kills everything else in its pid namespace, and takes links, routes, rules and mounts away.
Only cgroup folders outlive it (cgroups.py).

Every path inside is the usual one. /run is new; /etc and /var are an overlay over the machine's own, so that nothing
inside can change those; what a real node has on disk is on a tmpfs that the fabric holds, so that it outlives a reboot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from clusterlab import plan

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_START = 60.0

_FABRIC = """\
set -eu
mount -t tmpfs -o mode=755 fabric "$DISKS"
"""

_HOST = """\
set -eu
# a /sys of this network namespace, and in it the cgroup tree of the machine, which a new /sys lacks
mkdir -p "$WORK/cgroup"
mount --rbind /sys/fs/cgroup "$WORK/cgroup"
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount --move "$WORK/cgroup" /sys/fs/cgroup
for place in etc var; do
  mkdir -p "$DISK/$place" "$DISK/$place.work"
  mount -t overlay -o "lowerdir=/$place,upperdir=$DISK/$place,workdir=$DISK/$place.work" overlay "/$place"
done
# containerd's overlayfs cannot lie on an overlay; and the machine's own state is none of ours
for place in $STATE; do
  mkdir -p "/$place" "$DISK/state/$place"
  mount --bind "$DISK/state/$place" "/$place"
done
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/netns /run/lock
# as systemd has it: without, no pod gets a volume into which the host's mounts propagate
mount --make-rshared /
"""
_STATE = ("var/lib/cni", "var/lib/containerd", "var/lib/kubelet", "var/log/pods", "var/log/containers", "etc/cni")
_STATE_OF_NETACCT = ("etc/netacct", "var/lib/netacct")


class HostError(AssertionError):
    """Something in a host did not work: what, where, and the end of what it printed."""


def until(condition: Callable[[], object], patience: float, complaint: str | Callable[[], str]) -> None:
    """Wait until the condition holds. Raises HostError with the complaint when it does not."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise HostError(f"{complaint if isinstance(complaint, str) else complaint()} ({patience:g} s)")
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


class _Service:
    """A command that a host runs in the background; it can be stopped and started."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.argv = list(argv)
        self.environ = dict(environ)
        self.process: subprocess.Popen[bytes] | None = None


class Namespaces:
    """Three namespaces and their first process.

    Args:
        name: for people, and for the folder below `work`.
        work: a folder of the cluster, on the machine's disk.
        script: bash that the first process runs, as root inside, before it is ready.
        environ: variables of the script, besides WORK, the host's own folder.
        mounts_of: the pid of a process whose mounts are the beginning; the machine's own otherwise.
        keep: outlive the harness.
    """

    def __init__(
        self, name: str, work: Path, script: str, environ: Mapping[str, str], mounts_of: int = 0, *, keep: bool = False
    ) -> None:
        self.name = name
        self.folder = work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.joinpath("up").unlink(missing_ok=True)
        argv = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if mounts_of:
            argv = ["nsenter", "-t", str(mounts_of), "-m", "--", *argv]
        stay = "sleep 2147483647 & wait" if keep else "read || :"
        with self.folder.joinpath("init.log").open("ab") as log:
            self._holder = subprocess.Popen(
                [*argv, "bash", "-c", f'{script}\ntouch "$WORK/up"\n{stay}'],
                stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "WORK": str(self.folder), **environ},
                start_new_session=True,
            )
        until(self._is_up, _START, lambda: f"{name} does not come up: {self.read_log('init')}")
        (self.pid,) = _children(self._holder.pid)

    def _is_up(self) -> bool:
        return self.folder.joinpath("up").exists() or self._holder.poll() is not None

    def read_log(self, service: str, last: int = 2000) -> str:
        """The end of what a service printed (`init`: the first process)."""
        with contextlib.suppress(OSError):
            return self.folder.joinpath(f"{service}.log").read_text(encoding="utf-8", errors="replace")[-last:]
        return ""

    def kill(self) -> None:
        """End it with everything inside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(60)
        if self._holder.stdin:
            self._holder.stdin.close()

    def enter(self, flags: str = "nmp") -> list[str]:
        """The beginning of a command that runs inside: of network (n), mount (m) and pid (p) namespace."""
        # where the mounts are others, the working directory may be none: nsenter is told to take the root
        place = ["--wd=/"] if "m" in flags else []
        return ["nsenter", "-t", str(self.pid), *(f"-{flag}" for flag in flags), *place, "--"]

    def batch(self, *commands: str) -> None:
        """Run ip(8) commands in the network namespace, with the pids of the machine."""
        text = "\n".join(commands)
        done = subprocess.run(
            [*self.enter("n"), "ip", "-batch", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise HostError(f"{self.name}: ip: {done.stderr.strip()}\n{text}")


class Fabric(Namespaces):
    """The bridge that joins the hosts, and the disks of all of them."""

    def __init__(self, work: Path, *, keep: bool = False) -> None:
        self.work = work
        self.disks = work / "disks"
        self.disks.mkdir(parents=True)
        self.keep = keep
        super().__init__("fabric", work, _FABRIC, {"DISKS": str(self.disks)}, keep=keep)
        self.batch(
            "link set lo up",
            "link add br0 type bridge mcast_snooping 0 stp_state 0 forward_delay 0",
            "link set br0 up",
        )


class Host(Namespaces):
    """A host on the fabric.

    Args:
        name: of the host.
        addresses: its addresses on the fabric.
        fabric: what joins it to the others.
        routes: `network via address` or `default via address`, both families.
    """

    def __init__(self, name: str, addresses: plan.Pair, fabric: Fabric, routes: Sequence[str] = ()) -> None:
        self.name = name
        self.addresses = addresses
        self._fabric = fabric
        self._routes = tuple(routes)
        self._services: dict[str, _Service] = {}
        self._boot()

    @property
    def name_on_fabric(self) -> str:
        """The name of its port of the bridge."""
        return f"p-{self.name}"

    def _boot(self) -> None:
        environ = {
            "DISK": str(self._fabric.disks / self.name),
            "STATE": " ".join(_STATE + _STATE_OF_NETACCT),
        }
        super().__init__(self.name, self._fabric.work, _HOST, environ, self._fabric.pid, keep=self._fabric.keep)
        port = self.name_on_fabric
        self._fabric.batch(
            f"link add {port} type veth peer name up0 netns {self.pid}",
            f"link set {port} master br0 up",
        )
        self.sysctl("net.ipv4.ip_forward", 1)
        self.sysctl("net.ipv6.conf.all.forwarding", 1)
        self.batch(
            "link set lo up",
            *(f"addr add {self.addresses[family]}/{plan.WIDTH[family]} dev up0 nodad" for family in plan.FAMILIES),
            "link set up0 up",
            *(f"route add {route}" for route in self._routes),
        )

    def run(
        self, argv: Sequence[str], text: str | None = None, *, check: bool = True, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, with `text` as its input. Raises HostError where it fails and `check` is set."""
        done = subprocess.run(
            [*self.enter(), *argv],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if check and done.returncode:
            raise HostError(f"{self.name}: {' '.join(argv)}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done

    def popen(self, argv: Sequence[str], log: Path | IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Start a command inside. Its pid is that of the nsenter(1) around it: end it by `signal_of`."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("ab")) if isinstance(log, Path) else log
            return subprocess.Popen(
                [*self.enter(), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if out is None else out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def signal_of(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
        """Send a signal to what `popen` started: to the command, not to the nsenter(1) around it."""
        until(lambda: _children(process.pid) or process.poll() is not None, 60, "the command does not start")
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def serve(self, service: str, argv: Sequence[str], **environ: str) -> None:
        """Run a command in the background under a name, by which it can be stopped and started; it logs to a file."""
        self._services[service] = _Service(argv, environ)
        self.start(service)

    def start(self, service: str) -> None:
        """Start a service that was stopped or has ended."""
        known = self._services[service]
        assert known.process is None or known.process.poll() is not None, f"{self.name}: {service} runs already"
        settings = [f"{key}={value}" for key, value in known.environ.items()]
        argv = ["env", *settings, *known.argv] if settings else known.argv
        known.process = self.popen(argv, self.folder / f"{service}.log")

    def stop(self, service: str, number: int = signal.SIGTERM, patience: float = 90.0) -> None:
        """End a service by a signal, and wait until it has ended (the API server closes watches first: a minute)."""
        process = self._services[service].process
        assert process is not None
        self.signal_of(process, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            self.signal_of(process, signal.SIGKILL)
            process.wait(60)
            raise HostError(f"{self.name}: {service} does not stop: {self.read_log(service)}") from None

    def runs(self, service: str) -> bool:
        """Whether a service runs."""
        known = self._services.get(service)
        return known is not None and known.process is not None and known.process.poll() is None

    @property
    def services(self) -> tuple[str, ...]:
        """The names of all services, in the order in which they were first started."""
        return tuple(self._services)

    def reboot(self) -> None:
        """Its namespaces are made anew, and the services that ran started again; what was on disk is still there."""
        running = [service for service in self._services if self.runs(service)]
        self._power_off()
        self._boot()
        self._power_on(running)

    def _power_off(self) -> None:
        # the kernel takes the link away later, when it cleans up the network namespace
        self._fabric.batch(f"link del {self.name_on_fabric}")
        self.kill()

    def _power_on(self, services: Sequence[str]) -> None:
        for service in services:
            self.start(service)

    def kill(self) -> None:
        """End it with everything inside."""
        super().kill()
        for service in self._services.values():
            if service.process is not None:
                service.process.wait(60)

    def path(self, inside: str) -> Path:
        """Where a file of the host is for this process."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def write(self, inside: str, text: str) -> None:
        """Replace a file of the host in one step."""
        target = self.path(inside)
        fresh = target.with_name(target.name + ".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)

    def sysctl(self, key: str, value: int) -> None:
        """Set a key of the host's network."""
        self.run(["sysctl", "-qw", f"{key}={value}"])

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is in the host's network namespace for the length of the block."""
        with open(f"/proc/{self.pid}/ns/net", "rb") as there, inside(there.fileno()):  # noqa: PTH123 -- no file of a disk
            yield


@contextlib.contextmanager
def inside(descriptor: int) -> Iterator[None]:
    """The calling thread, and what it starts, is in a network namespace for the length of the block."""
    with open("/proc/thread-self/ns/net", "rb") as back:  # noqa: PTH123 -- as above
        _setns(descriptor)
        try:
            yield
        finally:
            _setns(back.fileno())


def _setns(descriptor: int) -> None:
    """os.setns came with Python 3.12 only."""
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
