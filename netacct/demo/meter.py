"""What is compared with what was sent: something that counts in the node. The real agent, scraped over HTTP."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from netacct.demo import exposition, files
from netacct.demo.expect import Totals
from netacct.demo.files import PORT
from netacct.demo.netns import DemoError, Namespace
from netacct.demo.world import PODS

_START = 60.0  # seconds for the agent to answer
_NOTICE = 30.0  # seconds for the agent to notice a changed pods.yaml
_STOP = 30.0  # seconds for the agent to remove its rules and end
_ANSWER = 20.0  # seconds for a page


class Meter(Protocol):
    """Counts the node's traffic by pod and class."""

    def follow(self, pods: Collection[str]) -> None:
        """From now on exactly these pods live; returns when the meter knows it."""

    def read(self) -> Totals:
        """All totals since the meter began."""


class Agent:
    """`netacct run`, in the node's namespace, with its files in a folder of its own."""

    def __init__(self, node: Namespace, folder: Path, datapath: str, *, cni: bool) -> None:
        self._node = node
        self._folder = folder
        self._datapath = datapath
        self._cni = cni
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Where the agent's own output goes."""
        return self._folder / "agent.log"

    @property
    def config(self) -> Path:
        """The agent's configuration."""
        return self._folder / "netacct.yaml"

    def counts_by(self) -> str:
        """The datapath that `auto` became: `iptables` or `nftables`. Asks the agent; raises OSError as it is gone."""
        return exposition.datapath(self._get("/metrics"))

    def start(self, pods: Collection[str]) -> None:
        """Write the files, start the agent and wait until it serves. Raises DemoError with the end of its log."""
        config = files.config(self._folder, self._datapath, cni=self._cni)
        self.config.write_text(config, encoding="ascii")
        self._folder.joinpath("policy.yaml").write_text(files.policy(), encoding="ascii")
        self._write_pods(pods)
        command = [sys.executable, "-m", "netacct", "run", f"--config.file={self.config}"]
        # pdeathsig: when this process is killed, nobody else would stop the agent
        guard = ["setpriv", "--pdeathsig", "TERM", "--"]
        with self._node.entered(), self.log.open("wb") as log:
            self._process = subprocess.Popen(
                guard + command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._await(lambda: bool(self._get("/readyz")), _START, "is not ready")
        self._await_pods(pods)

    def datapath(self) -> str:
        """What it counts by."""
        samples = exposition.samples(self._get("/metrics"))
        return next(labels["datapath"] for name, labels, _ in samples if name == "netacct_build_info")

    def follow(self, pods: Collection[str]) -> None:
        """Rewrite pods.yaml, and wait until the agent shows every pod that is in it."""
        self._write_pods(pods)
        self._await_pods(pods)

    def read(self) -> Totals:
        """Scrape /metrics, twice: a new series shows 0 in its first scrape, whatever `zero_first` is."""
        self.check_alive()
        try:
            self._get("/metrics")
            return exposition.totals(self._get("/metrics"))
        except OSError as error:
            self.check_alive()
            raise DemoError(f"the agent does not answer: {error}\n{self._tail()}") from error

    def stop(self) -> None:
        """End the agent: asked first, then made to."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _write_pods(self, pods: Collection[str]) -> None:
        fresh = self._folder / "pods.yaml.new"
        fresh.write_text(files.pods(pods), encoding="ascii")
        fresh.replace(self._folder / "pods.yaml")

    def _await_pods(self, pods: Collection[str]) -> None:
        self._await(
            lambda: {(name, PODS[name].workload) for name in pods} <= exposition.pods(self._get("/metrics")),
            _NOTICE,
            "does not show all pods of pods.yaml with their workloads",
        )

    def _await(self, done: Callable[[], bool], patience: float, complaint: str) -> None:
        end = time.monotonic() + patience
        while True:
            self.check_alive()
            try:
                if done():
                    return
            except OSError:
                pass  # it does not listen yet, or answers 503
            if time.monotonic() > end:
                raise DemoError(f"the agent {complaint} after {patience:.0f} s:\n{self._tail()}")
            time.sleep(0.05)

    def check_alive(self) -> None:
        """Raise DemoError, with the end of its log, when the agent has ended."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise DemoError(f"the agent ended with exit code {code}:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])

    def _get(self, path: str) -> str:
        """The body of a page; raises OSError for anything but 200."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=_ANSWER)
        connection.sock = self._node.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.sock.settimeout(_ANSWER)
            connection.sock.connect(("127.0.0.1", PORT))
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{path}: HTTP {answer.status}")
        return body
