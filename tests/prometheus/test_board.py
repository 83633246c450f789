"""The board's contract with the agent: every expression of it, over real traffic, in two real Prometheus servers.

A node with pods in namespaces, the real agent on it, and two servers that scrape it each second. Pods of two namespaces
talk to each other, to the internet and to private hosts; one of them lives for five seconds. Then the board is opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promlab
import pytest
from promlab import Process, Prometheus, Vector

from netacct.demo import expect, exposition, files
from netacct.demo.expect import Series, Totals
from netacct.demo.flows import Burst, Datagrams
from netacct.demo.netns import Namespace
from netacct.demo.peers import NOTHING
from netacct.demo.topology import Topology
from netacct.demo.traffic import Driver
from netacct.demo.world import BACKENDS, LOCAL_RANGES

MISSING = promlab.missing("prometheus")
pytestmark = [pytest.mark.kernel, pytest.mark.prometheus, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

BOARD = promlab.ROOT / "monitoring" / "dashboards" / "my-experiment.json"
ZERO_FIRST = 5.0
SAMPLED = 50.0
"""Seconds for which every series was scraped before the board is opened. A board that opens just after a scrape adds a
tenth of a second to that; one that opens just before the next would add a whole one, which is 1 % only of 100 s."""
FRESH = 0.2
"""Seconds after a scrape within which the board is opened."""
LIFE = 5.0
PATIENCE = 60.0
"""Seconds for what must come."""
NAMESPACES = ("team-a", "team-b")
PREDECESSOR, SHORT = "eval-0", "train-2"
"""The pod that lives for five seconds has the address of one that died before."""
UNKNOWN = "web-0"
"""A pod that no source knows: its bytes have no owner."""

CONFIG = """\
policy: {folder}/policy.yaml
local_ranges: ["{range4}", "{range6}"]
identity: {{sources: [file], file: {{path: {folder}/pods.yaml}}, late_binding: 2s}}
metrics: {{zero_first: {zero_first:.0f}s}}
state_dir: {folder}/state
accounts_dir: {folder}/accounts
web: {{listen_address: ["127.0.0.1:{port}"]}}
"""
SCRAPE = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s, external_labels: {{replica: "{replica}"}}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: netacct
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

TALKS = (
    # client, to: UDP both ways; more than one place of a pod's class, and more than one class of each pod
    ("train-0", "train-1"),
    ("train-0", "exit"),
    ("train-0", "remote"),
    ("train-1", "exit"),
    ("train-1", "private"),
    ("remote", "train-1"),
    ("eval-0", "train-0"),
    ("eval-0", "exit"),
    ("private", "eval-0"),
    ("train-1", "service-web"),
    ("web-0", "exit"),
)
SHORT_TALKS = ((SHORT, "train-0"), (SHORT, "exit"), ("private", SHORT))


@dataclass(frozen=True, slots=True)
class Opened:
    """A board that one server shows at one moment: `at` and `since` in Unix seconds."""

    server: Prometheus
    since: float
    at: float

    def expand(self, expression: str, namespace: str) -> str:
        """An expression with Grafana's variables filled in; everything selected but the namespace."""
        values = {
            "namespace": namespace,
            "job": ".+",
            "instance": ".+",
            "workload": ".+",
            "pod": ".+",
            "__range": f"{round(self.at - self.since)}s",
            "__rate_interval": "4s",
        }
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)

    def ask(self, target: Mapping[str, Any], namespace: str) -> list[Vector]:
        """What a target of a panel shows: one value per series, or one per second for a graph."""
        query = self.expand(target["expr"], namespace)
        if target["instant"]:
            return self.server.instant(query, self.at)
        return self.server.over_time(query, self.since, self.at, 1.0)


@dataclass(frozen=True, slots=True)
class Evening:
    """Two boards over the same traffic, and what the sockets counted of it."""

    boards: tuple[Opened, Opened]
    driven: Totals


def targets(*kinds: str, containing: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """The targets of the board's panels of these types, with a name for messages."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [
        (f"{panel['title']} {target['refId']}", target)
        for panel in panels
        if panel["type"] in kinds
        for target in panel["targets"]
        if containing in target["expr"]
    ]


class Node:
    """The agent and the servers in the node's namespace, and the traffic around it."""

    def __init__(self, topology: Topology, folder: Path, close: contextlib.ExitStack) -> None:
        self._topology, self._folder = topology, folder
        self._space: Namespace = topology.spaces["node"]
        self._driver = Driver(topology.spaces, 4)
        self._port = 20000
        self.driven: Totals = {}
        self._agent = self._start_agent()
        close.callback(self._agent.stop)
        self.servers = (self._start_server("a", 9090, close), self._start_server("b", 9091, close))
        for server in self.servers:
            server.wait_ready()

    def follow(self, pods: Collection[str]) -> None:
        """Rewrite pods.yaml, and wait until the agent knows every pod that is in it."""
        fresh = self._folder / "pods.yaml.new"
        fresh.write_text(files.pods(pods), encoding="ascii")
        fresh.replace(self._folder / "pods.yaml")
        self._agent.wait_until(
            lambda: set(pods) <= {name for name, _ in exposition.pods(self._scrape())}, "aware of the pods"
        )

    def talk(self, *pairs: tuple[str, str]) -> None:
        """Let each pair exchange datagrams, and note what both sockets counted."""
        for client, to in pairs:
            self._port += 1
            size = 700 + self._port % 500  # no two exchanges alike, so that no two mistakes cancel out
            server = BACKENDS.get(to, to)
            flow = Datagrams(client, to, server, self._port, Burst(40, size), Burst(25, size - 300))
            parts = expect.expected_of_datagrams(flow, 4, self._driver.exchange(flow))
            for series, count in expect.total((owned(series), count) for series, count in parts).items():
                self.driven[series] = self.driven.get(series, NOTHING).plus(count)

    def kill(self, pod: str) -> None:
        """Take a pod's link and namespace away."""
        self._topology.unplug(pod)
        self._topology.bury(pod)

    def give_addresses(self, pod: str) -> None:
        """Put a new pod at its address."""
        self._topology.give_addresses(pod)

    def scraped(self, server: Prometheus, seconds: float) -> float | None:
        """The present, if this server scraped the agent within so many seconds before it."""
        now = time.time()
        newest = server.scalar("timestamp(netacct_build_info)", now)
        return now if newest is not None and now - newest < seconds else None

    def _start_agent(self) -> Process:
        text = CONFIG.format(
            folder=self._folder,
            range4=LOCAL_RANGES[4],
            range6=LOCAL_RANGES[6],
            port=files.PORT,
            zero_first=ZERO_FIRST,
        )
        self._folder.joinpath("netacct.yaml").write_text(text, encoding="ascii")
        self._folder.joinpath("policy.yaml").write_text(files.policy(), encoding="ascii")
        self._folder.joinpath("pods.yaml").write_text("pods: []\n", encoding="ascii")
        command = [sys.executable, "-m", "netacct", "run", f"--config.file={self._folder}/netacct.yaml"]
        agent = Process(self._space, command, self._folder / "agent.log")
        agent.wait_until(lambda: "netacct_build_info" in self._scrape(), "serving")
        return agent

    def _start_server(self, name: str, port: int, close: contextlib.ExitStack) -> Prometheus:
        rules = promlab.ROOT / "monitoring" / "rules" / "netacct.rules.yaml"
        config = SCRAPE.format(rules=rules, port=files.PORT, replica=name)  # external labels move the scrapes apart
        server = Prometheus(self._space, self._folder / name, config, port)
        close.callback(server.stop)
        return server

    def _scrape(self) -> str:
        return promlab.fetch(self._space, files.PORT, "/metrics")


def owned(series: Series) -> Series:
    """Where a pod's bytes go: to it, or to nobody where no source knows it."""
    return Series("unattributed", "", "", series.direction, series.traffic) if series.name == UNKNOWN else series


def wait_for(moment: Callable[[], float | None], what: str) -> float:
    """Wait for a moment, not for ever."""
    end = time.monotonic() + PATIENCE
    while (found := moment()) is None:
        assert time.monotonic() < end, f"no {what} in {PATIENCE:.0f} s"
        time.sleep(0.02)
    return found


def live_five_seconds(node: Node, others: list[str]) -> None:
    """A pod comes to the address of one that died, talks each second, and is gone after five seconds."""
    node.follow(others)
    node.kill(PREDECESSOR)
    node.give_addresses(SHORT)
    begin = time.monotonic()
    node.follow([*others, SHORT])
    for second in range(int(LIFE)):
        node.talk(*SHORT_TALKS)
        time.sleep(max(0.0, begin + second + 1 - time.monotonic()))
    node.follow(others)
    node.kill(SHORT)


def spend_an_evening(node: Node) -> Evening:
    """Drive everything, let the servers scrape on, and open the board of each just after a scrape."""
    since = time.time()
    for server in node.servers:
        wait_for(functools.partial(node.scraped, server, 60.0), "first scrape")
    lasting = ["train-0", "train-1"]
    node.follow([*lasting, PREDECESSOR])
    for _ in range(3):
        node.talk(*TALKS)
        time.sleep(0.5)
    live_five_seconds(node, lasting)
    since_last_new_series = time.monotonic() - LIFE
    node.talk(*(pair for pair in TALKS if PREDECESSOR not in pair))
    time.sleep(max(0.0, since_last_new_series + SAMPLED + 1 - time.monotonic()))
    first, second = (
        Opened(server, since, wait_for(functools.partial(node.scraped, server, FRESH), "fresh scrape"))
        for server in node.servers
    )
    return Evening((first, second), node.driven)


@pytest.fixture(scope="module")
def evening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evening]:
    """The one run that all tests of this file look at."""
    with contextlib.ExitStack() as close:
        topology = Topology()
        close.callback(topology.close)
        topology.build()
        yield spend_an_evening(Node(topology, tmp_path_factory.mktemp("board"), close))


TOTAL = re.compile(
    r"increase\(netacct_(pod|workload|namespace)_(receive|transmit)_bytes_total\{[^}]*?(?:traffic=\"(\w+)\")?\}"
)
TOTALS = targets("stat", "table", containing="increase(")
SHOWN = targets("stat", "table", "timeseries")
TRUST = ("Nodes ", "Share ", "Oldest ")
"""Panels about the numbers themselves, for which nothing is a good answer."""


def named(found: list[tuple[str, Mapping[str, Any]]]) -> pytest.MarkDecorator:
    """The targets as parameters of a test."""
    return pytest.mark.parametrize("target", [pytest.param(target, id=name) for name, target in found])


def driven_bytes(evening: Evening, target: Mapping[str, Any], namespace: str) -> dict[str, int]:
    """What a total of the board must be: bytes by pod, or by KIND/WORKLOAD, or of all where it shows one number."""
    match = TOTAL.search(target["expr"])
    assert match, target["expr"]
    level, direction, traffic = match.groups()
    sums: dict[str, int] = {}
    for series, count in evening.driven.items():
        place = (series.level, series.namespace, series.direction)
        if place == (level, namespace, direction) and traffic in (None, series.traffic):
            sums[series.name] = sums.get(series.name, 0) + count.bytes
    return sums


def shown_bytes(board: Opened, target: Mapping[str, Any], namespace: str) -> dict[str, float]:
    """What the board shows, by the same names."""
    return {
        "/".join(
            vector.labels[label] for label in ("workload_kind", "workload", "pod") if label in vector.labels
        ): value
        for vector in board.ask(target, namespace)
        for value in vector.values
    }


@named(SHOWN)
def test_every_expression_shows_the_traffic(evening: Evening, target: Mapping[str, Any], request: Any) -> None:
    """On both servers and for both namespaces, each expression of the board is valid, and above 0 at some time."""
    for board in evening.boards:
        for namespace in NAMESPACES:
            found = board.ask(target, namespace)

            assert found
            assert all(value >= 0 for vector in found for value in vector.values)
            if not request.node.callspec.id.startswith(TRUST):
                assert all(max(vector.values) > 0 for vector in found), found


@named(TOTALS)
def test_every_total_is_what_was_driven(evening: Evening, target: Mapping[str, Any]) -> None:
    """Each total is within one percent of what the sockets sent and got, with no row too many and none missing."""
    for board in evening.boards:
        for namespace in NAMESPACES:
            driven = driven_bytes(evening, target, namespace)

            assert driven
            assert shown_bytes(board, target, namespace) == pytest.approx(driven, rel=0.01)


def test_the_pod_of_five_seconds_is_on_the_board(evening: Evening) -> None:
    """It has its bytes of both directions, from and to the internet, pods and private hosts, to one percent."""
    for board in evening.boards:
        for name, target in TOTALS:
            if name.startswith("Totals by pod"):
                driven = driven_bytes(evening, target, "team-a")[SHORT]

                assert driven > 50_000
                assert shown_bytes(board, target, "team-a")[SHORT] == pytest.approx(driven, rel=0.01)


@named(TOTALS)
def test_two_scrapers_show_the_same(evening: Evening, target: Mapping[str, Any]) -> None:
    """Scraped by two servers at once, which share readings, both boards have the same totals to one percent."""
    first, second = (shown_bytes(board, target, "team-a") for board in evening.boards)

    assert first == pytest.approx(second, rel=0.01)


def test_now_and_peak_fit_the_totals(evening: Evening) -> None:
    """All bytes came within the last two minutes, so now is their two-minute mean, and the peak is not below it."""
    now, peak, total = (
        [t for name, t in SHOWN if re.fullmatch(rf"{title} \w", name)] for title in ("Now", "Peak", "Total")
    )
    for board in evening.boards:
        for namespace in NAMESPACES:
            for targets_of_one_kind in zip(now, peak, total, strict=True):
                values = [board.ask(target, namespace)[0].values[0] for target in targets_of_one_kind]

                assert values[0] == pytest.approx(values[2] / 120, rel=0.05)
                assert values[0] <= values[1] * 1.02
                assert values[1] <= values[2] / 100


@named(targets("timeseries"))
def test_graphs_have_the_labels_of_their_legends(evening: Evening, target: Mapping[str, Any]) -> None:
    """Each line of a graph has a name that differs from the others'."""
    names = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    found = [tuple(vector.labels[name] for name in names) for vector in evening.boards[0].ask(target, "team-a")]

    assert names
    assert len(set(found)) == len(found)


def test_the_share_without_an_owner_is_measured(evening: Evening) -> None:
    """The bytes of the pod that no source knows are the share that the board admits to."""
    [(_, target)] = targets("stat", containing="unattributed")
    ends = {
        level: sum(count.bytes for series, count in evening.driven.items() if series.level == level)
        for level in ("unattributed", "namespace")
    }
    share = ends["unattributed"] / sum(ends.values())

    assert 0.05 < share < 0.5
    assert evening.boards[0].ask(target, "team-a")[0].values[0] == pytest.approx(share, rel=0.05)
