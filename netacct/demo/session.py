"""One run of the demo from start to end: what it needs, what it makes, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from netacct.demo import cni
from netacct.demo.cni import Cni
from netacct.demo.files import PORT
from netacct.demo.meter import Agent
from netacct.demo.netns import DemoError, Namespace
from netacct.demo.stage import Row, Stage
from netacct.demo.topology import Topology
from netacct.errors import PermissionRefusedError

TOOLS = {
    "ip": "iproute2",
    "nft": "nftables",
    "iptables-legacy-restore": "iptables",
    "ip6tables-legacy-restore": "iptables",
    "setpriv": "util-linux",
}
"""Programs that the demo runs, and the Debian package of each."""

POD_MAKERS = ("auto", "cni", "veth")
"""How pods are made: by the real CNI plugins where they are there, by them or not at all, by plain veth pairs."""

_PREFIX = "netacct-demo-"
_OWN_USER_NAMESPACE = "NETACCT_DEMO_USER_NAMESPACE"
"""Set in the environment by `become_root` for the process that it starts."""
_LOOK_INTO_KERNEL = {
    "iptables": ("iptables-legacy-save -t mangle", "ipset list -terse"),
    "nftables": ("nft -t list table ip netacct", "nft -t list table ip6 netacct"),
}
"""Commands that show what counts, without a line for each address, by datapath."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def perform(
    datapath: str, pods: str, report: Callable[[list[Row]], None], say: Callable[[str], None], *, keep: bool
) -> list[Row]:
    """Build, drive, compare, take down.

    Args:
        datapath: the agent's `datapath` setting.
        pods: one of `POD_MAKERS`.
        report: gets the rows as soon as they are known, also when the demo then keeps running.
        say: gets a line of progress.
        keep: leave everything running, with a little traffic, until a signal comes.

    Raises:
        DemoError: a tool is missing, or a step failed; says which.
        PermissionRefusedError: network namespaces are not allowed here.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came before the rows were known.
    """
    require_tools()
    with _signals(), _folder() as folder:
        topology = Topology()
        agent = None
        try:
            say("building the node, its pods and its peers")
            maker = _maker(pods, folder, say)
            topology.build(maker)
            agent = Agent(topology.spaces["node"], folder, datapath, cni=maker is not None)
            stage = Stage(topology, agent)
            say("starting the agent")
            agent.start(stage.pods)
            say(f"it counts by {agent.datapath()}")
            rows = stage.play(say)
            report(rows)
            if keep:
                _keep(stage, agent, look_around(topology, agent))
            return rows
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
            if agent:
                agent.stop()
            topology.close()


def _maker(pods: str, folder: Path, say: Callable[[str], None]) -> Callable[[Namespace], Cni] | None:
    """How pods get their interfaces: None for plain veth pairs. Says what it will be, and why nothing better."""
    binaries = None if pods == "veth" else cni.plugins()
    if binaries is None:
        if pods == "cni":
            raise DemoError("there are no CNI plugins here (Debian package containernetworking-plugins)")
        why = "" if pods == "veth" else ": there are no CNI plugins here (Debian package containernetworking-plugins)"
        say(f"pods get plain veth pairs, and are known by pods.yaml alone{why}")
        return None
    tool = cni.cnitool()
    if tool:
        say(f"pods are made by the CNI plugins of {binaries}, through libcni ({tool})")
    else:
        say(f"pods are made by the CNI plugins of {binaries}; without cnitool, the demo writes libcni's cache itself")
    return lambda node: Cni(node, folder / "cni", binaries, tool)


def require_tools() -> None:
    """Raise DemoError when a program is missing; also looks where only root's PATH leads."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise DemoError(f"the demo needs the program {tool} (Debian package {package})")


def become_root(arguments: Sequence[str]) -> None:
    """Where this is not root: start over as root of a user namespace. Returns for root only.

    The new mount namespace gets a /run of its own, because /run/xtables.lock belongs to the real root.

    Args:
        arguments: the command line of `netacct`, without the program.

    Raises:
        PermissionRefusedError: the machine does not allow user namespaces.
    """
    if os.geteuid() == 0:
        return
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    start = 'mount -t tmpfs none /run && exec "$@"'
    if shutil.which("unshare") is None:
        raise DemoError("without root the demo needs the program unshare (Debian package util-linux)")
    tried = subprocess.run([*unshare, "sh", "-c", start, "sh", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise PermissionRefusedError(
            f"the demo needs root, because user namespaces are not allowed here: {tried.stderr.strip()}"
        )
    command = [*unshare, "sh", "-c", start, "sh", sys.executable, "-m", "netacct", *arguments]
    os.execvpe("unshare", command, {**os.environ, _OWN_USER_NAMESPACE: "1"})  # noqa: S606 -- replacing is the point


def look_around(topology: Topology, agent: Agent) -> str:
    """Commands for another terminal."""
    # from outside of a user namespace one has to enter that as well; the agent's process is in all of them
    user = (
        "" if _OWN_USER_NAMESPACE not in os.environ else f"--user=/proc/{os.getpid()}/ns/user --preserve-credentials "
    )
    node = f"nsenter {user}--net={topology.spaces['node'].path}"
    pod = f"nsenter {user}--net={topology.spaces['train-0'].path}"
    netacct = f"{node} {sys.executable} -m netacct"
    kernel = "".join(f"  {node} {command}\n" for command in _LOOK_INTO_KERNEL[agent.counts_by()])
    return (
        f"It keeps running, with a little traffic each second, until Ctrl-C. In another terminal, as the same user:\n"
        f"  {node} curl -s http://127.0.0.1:{PORT}/metrics | grep ^netacct_pod\n"
        f"  {netacct} pods --config.file {agent.config}\n"
        f"  {netacct} rules diff --config.file {agent.config}\n"
        f"{kernel}"
        f"  {pod} ip addr                 # inside the pod team-a/train-0\n"
        f"  ls {agent.log.parent}         # configuration, policy, pods, state, the agent's log\n"
    )


def _keep(stage: Stage, agent: Agent, hint: str) -> None:
    """Traffic until a signal comes. The hint goes to stderr: stdout may be a JSON document."""
    with contextlib.suppress(KeyboardInterrupt):
        sys.stderr.write(hint)  # who reads it may answer with Ctrl-C at once
        while True:
            stage.murmur()
            agent.check_alive()
            time.sleep(1)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Every signal that asks to end becomes a KeyboardInterrupt, so that the cleaning up runs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder of our own, removed at the end; what killed runs have left is removed first.

    A running demo holds a lock in its folder, which the kernel lets go of when the process ends.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (folder / "lock.new").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock.new").rename(folder / "lock")
            yield folder
        finally:
            shutil.rmtree(folder)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # BlockingIOError: its demo runs; FileNotFoundError: its demo is just ending, or has no lock yet
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
