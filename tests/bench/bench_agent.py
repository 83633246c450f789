"""The running agent: what a scrape costs it, how much memory it holds, and how soon it serves."""

from __future__ import annotations

import gzip
import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_lane import INTERNET, NODE, PEER, Flow, Lane, write_routes
from bench_variants import LOCAL_24, write_policy

PODS, REPLACED = 110, 2
PORT = 19112
PATIENCE = 30.0
CONFIG = """policy: {policy}
datapath: iptables
local_ranges: [{local}]
identity: {{sources: [file], file: {{path: {pods}}}}}
metrics: {metrics}
state_dir: {folder}/state
accounts_dir: {folder}/accounts
web: {{listen_address: ["127.0.0.1:{port}"]}}
"""
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
"""What Prometheus sends with each scrape."""


def pods_yaml(generation: int) -> str:
    """110 pods of 10 namespaces and 22 jobs; each generation has other pods at `REPLACED` of the addresses."""
    lines = ["pods:"]
    for number in range(PODS):
        # the replaced pods move through the addresses, so that in time each one has changed hands
        life = (generation * REPLACED + PODS - 1 - number) // PODS
        team, job = f"team-{number % 10}", f"train-{number % 22}"
        lines.append(
            f"  - {{namespace: {team}, name: {job}-{number}-{life}, uid: uid-{number}-{life}, "
            f"ips: [{_address(number)}], phase: Running, owner: {{kind: Job, name: {job}}}}}"
        )
    return "\n".join([*lines, ""])


def _address(number: int) -> str:
    return f"10.244.1.{10 + number}"


class Bed:
    """A node with 110 pods and traffic of every class, for an agent to run on. Its files are in `folder`.

    `metrics` is that section of the configuration.
    """

    def __init__(self, folder: Path, metrics: str = "{}") -> None:
        folder.mkdir()
        self.lane = Lane([LOCAL_24])
        self.pods = folder / "pods.yaml"
        self.config = folder / "netacct.yaml"
        self.log = folder / "log"
        policy = write_policy(folder / "policy.yaml")
        fill = {"policy": policy, "local": LOCAL_24, "pods": self.pods, "folder": folder, "port": PORT}
        self.config.write_text(CONFIG.format(**fill, metrics=metrics))
        self.set_pods(0)
        self._flows = _every_class(folder)

    def set_pods(self, generation: int) -> None:
        """Put the next generation of pods into the file, at once."""
        draft = self.pods.with_suffix(".new")
        draft.write_text(pods_yaml(generation))
        draft.rename(self.pods)

    def traffic(self) -> None:
        """A few packets of every class and direction, to and from every pod and the host."""
        for flow in self._flows:
            self.lane.blast(flow, 0, 2 * flow.length)

    @contextmanager
    def agent(self) -> Iterator[Agent]:
        """A running agent, from its first scrape on."""
        agent = Agent(self)
        try:
            agent.wait()
            yield agent
        finally:
            agent.stop()

    def close(self) -> None:
        """Take the node down."""
        self.lane.close()


def _every_class(folder: Path) -> list[Flow]:
    peers = ["10.244.32.5", PEER, "10.96.0.10", "172.20.0.5", INTERNET]
    pods = [_address(number) for number in range(PODS)]
    routes = {
        "pod": [(pod, peer) for pod in pods for peer in (*peers, NODE)],
        "inet": [(peer, local) for peer in peers for local in (*pods, NODE)],
        "node": [("-", address) for address in (*peers, *pods)],
    }
    return [
        Flow(sender, sender, write_routes(folder / f"from-{sender}", pairs), len(pairs), {})
        for sender, pairs in routes.items()
    ]


class Agent:
    """`netacct run` on a bed. `ready_after` is the seconds from exec to the first scrape that has every pod."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._connection: http.client.HTTPConnection | None = None
        self._log = bed.log.open("ab")
        self.ready_after = 0.0
        self._started = time.monotonic()
        self._process: subprocess.Popen[bytes] = bed.lane.start(
            sys.executable, "-m", "netacct", "run", "--config.file", str(bed.config), stdout=self._log, stderr=self._log
        )

    def wait(self) -> None:
        """Scrape until an answer has all pods in it. Raises RuntimeError where none comes."""
        while time.monotonic() < self._started + PATIENCE and self._process.poll() is None:
            try:
                page = self.scrape()
            except (OSError, http.client.HTTPException):
                page = b""
            if page.count(b"\nnetacct_pod_info{") == PODS:
                self.ready_after = time.monotonic() - self._started
                return
            time.sleep(0.005)
        raise RuntimeError(f"the agent did not serve {PODS} pods:\n{self._bed.log.read_text()[-4000:]}")

    def scrape(self) -> bytes:
        """One scrape as Prometheus makes it, over one connection; the page. Raises what http.client raises."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)
            self._connection.auto_open = 0  # it would open outside of the namespace
            with self._bed.lane.node.entered():
                self._connect()
        try:
            self._connection.request("GET", "/metrics", headers=PROMETHEUS)
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            self._hang_up()
            raise
        if response.will_close:
            self._hang_up()
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"status {response.status}: {body[:500]!r}")
        return gzip.decompress(body) if response.headers["Content-Encoding"] == "gzip" else body

    def _connect(self) -> None:
        assert self._connection is not None
        try:
            self._connection.connect()
        except OSError:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def cpu(self) -> float:
        """Seconds of CPU that the agent, all its threads together, has used so far."""
        # the process-wide CPU clock of another process: MAKE_PROCESS_CPUCLOCK in linux/include/linux/posix-timers.h
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def resident(self) -> float:
        """Resident memory in MB (10^6 bytes)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(kilobytes) * 1024 / 1e6

    def stop(self) -> None:
        """End it as systemd would; by force where that does not help."""
        self._hang_up()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
