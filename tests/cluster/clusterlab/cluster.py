"""A cluster: control plane, nodes and an internet host; from nothing to Ready in seconds, and away without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

from clusterlab import cgroups, classes, image, leftovers, plan, prerequisites
from clusterlab.agents import Agent
from clusterlab.classes import Difference, Totals, Translations
from clusterlab.control_plane import ControlPlane, manifest_text
from clusterlab.hosts import Fabric, Host, HostError, Namespaces, until
from clusterlab.node import RECEIVERS, Node
from clusterlab.pki import Pki
from clusterlab.truth import Flows, PodId

_QUIET = 1.3
"""Seconds without a packet after which a reading holds: the agent shares readings younger than a second."""


class Measurement(NamedTuple):
    """What the pods of each node sent and received, and what its agent shows, by the node's name."""

    sent: dict[str, Totals]
    counted: dict[str, Totals]


class Cluster:
    """A Kubernetes cluster of this machine.

    Args:
        prefix: begins the names that all clusters of the machine share: cgroups, and the folder. "netacct-" and the
            process id by default; more clusters of one process add letters.
        nodes: how many.
        proxy_mode: of kube-proxy, `iptables` or `nftables`.
        work_dir: where its files go; must not exist. A folder of the temporary directory by default.
        keep: outlive this process; else the kernel ends it all with the process, however that ends.

    `internet`, `control_plane` and `nodes` are hosts; `agents` has the agent of each node (not started);
    `pki` signs certificates.
    """

    def __init__(
        self,
        prefix: str = "",
        nodes: int = 2,
        proxy_mode: str = "iptables",
        work_dir: Path | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self.prefix = prefix or f"{leftovers.PREFIX}{os.getpid()}"
        self.proxy_mode = proxy_mode
        self.work = work_dir or Path(tempfile.mkdtemp(prefix=f"{self.prefix}-cluster-")) / "c"
        self._made = None if work_dir else self.work.parent
        self._number = nodes
        self._keep = keep
        self._hosts: list[Host] = []
        self._fabric: Fabric | None = None
        self.nodes: list[Node] = []
        self.agents: list[Agent] = []
        self._translations: dict[str, Translations] = {}

    def __enter__(self) -> Self:
        """Bring it up."""
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it down."""
        self.down()

    def up(self) -> None:
        """Bring it up; returns when nodes are Ready and take pods.

        Raises MissingError or HostError, and leaves nothing behind then.
        """
        self.programs = prerequisites.require()
        leftovers.sweep()
        try:
            self._build()
            self.wait_ready()
        except BaseException:
            self.down()
            raise

    def _build(self) -> None:
        self.work.mkdir(parents=True)
        self.traffic = image.build_traffic(self.work)
        archive = self.work / "box.tar"
        image.box(archive, self.traffic)
        self.pki = pki = Pki(self.work / "pki")
        self._fabric = fabric = Fabric(self.work, keep=self._keep)
        numbers = range(1, self._number + 1)
        to_pods = {number: _routes(number) for number in numbers}
        everywhere = [route for routes in to_pods.values() for route in routes]
        default = [f"default via {address}" for address in plan.GATEWAY.values()]
        self.control_plane = ControlPlane(fabric, self.programs, pki, [*default, *everywhere])
        self._hosts.append(self.control_plane)
        self.control_plane.serve_first()
        self.internet = Host("internet", plan.GATEWAY, fabric, everywhere)
        self._hosts.append(self.internet)
        widths = {4: 32, 6: 128}
        self.internet.batch(*(f"addr add {plan.INTERNET[f]}/{widths[f]} dev lo" for f in plan.FAMILIES))
        for number in numbers:
            others = [route for other in numbers if other != number for route in to_pods[other]]
            node = Node(number, self.prefix, fabric, self.programs, pki, [*default, *others], image.NAME)
            self.nodes.append(node)
            self._hosts.append(node)
            self.agents.append(Agent(node))
            node.set_proxy_mode(self.proxy_mode)
            node.serve_runtime(archive)
        self.control_plane.serve_rest()
        for node in self.nodes:
            node.serve_kubelet()

    @property
    def hosts(self) -> tuple[Namespaces, ...]:
        """All hosts, and what joins them."""
        return (*self._hosts, *([self._fabric] if self._fabric else []))

    def down(self) -> None:
        """End every host, and remove what was made. May be called at any time, also twice."""
        with contextlib.ExitStack() as stack:  # what fails keeps nothing else from being done; the last is done first
            for folder in (self._made, self.work):
                if folder is not None and folder.exists():
                    stack.callback(shutil.rmtree, folder)
            if self._fabric is not None:
                stack.callback(self._fabric.kill)
                self._fabric = None
            for number in range(1, self._number + 1):  # a node that did not come up has its cgroups nevertheless
                stack.callback(cgroups.remove, f"{self.prefix}-node{number}")
            for host in self._hosts:
                stack.callback(host.remove if isinstance(host, Node) else host.kill)
            self._hosts.clear()

    def wait_ready(self, patience: float = 240.0) -> None:
        """Wait until every node is Ready and the namespace `default` takes pods."""
        until(lambda: self._ready() == self._number, patience, lambda: f"nodes are not Ready: {self._logs()}")
        self._wait_account("default")

    def mend(self) -> None:
        """Start whatever a test has stopped and not started again, receivers of traffic excepted."""
        stopped = [
            (host, service)
            for host in self._hosts
            for service in host.services
            if service != RECEIVERS and not host.runs(service)
        ]
        for host, service in stopped:
            host.start(service)
        if stopped:
            self.control_plane.wait_api()
            self.wait_ready()
            for _, agent in self._running():
                agent.wait()

    def _ready(self) -> int:
        done = self.control_plane.kubectl("get", "nodes", "-o", "json", check=False)
        if done.returncode:
            return 0
        conditions = (item["status"].get("conditions", []) for item in json.loads(done.stdout)["items"])
        return sum(any(one["type"] == "Ready" and one["status"] == "True" for one in several) for several in conditions)

    def _wait_account(self, namespace: str) -> None:
        """A new namespace takes no pod before its ServiceAccount is there."""
        until(
            lambda: self.control_plane.kubectl("get", "-n", namespace, "sa", "default", check=False).returncode == 0,
            120,
            f"no ServiceAccount in {namespace}",
        )

    def _logs(self) -> str:
        return "\n".join(
            f"--- {host.name} {service}\n{host.read_log(service)}" for host in self._hosts for service in host.services
        )

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 -- as in subprocess
        """Run kubectl as cluster administrator, and return its output. Raises HostError."""
        return self.control_plane.kubectl(*arguments, text=input).stdout

    def apply(self, manifest: dict[str, Any] | list[dict[str, Any]]) -> None:
        """`kubectl apply` one object or several."""
        self.kubectl("apply", "-f", "-", input=manifest_text(manifest))

    def namespace(self, *names: str) -> None:
        """Make namespaces; returns when they take pods."""
        self.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names])
        for name in names:
            self._wait_account(name)

    def get(self, kind: str, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """The objects of a kind, of all namespaces by default."""
        where = ["-n", namespace] if namespace else ["-A"]
        which = ["-l", selector] if selector else []
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *where, *which, "-o", "json"))["items"]
        return items

    def wait_pods(
        self, namespace: str, number: int, selector: str = "", phase: str = "Running", patience: float = 240.0
    ) -> list[dict[str, Any]]:
        """Wait until so many pods are in a phase (`Running`: and ready), and return them by name."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [pod for pod in self.get("pods", namespace, selector) if _in_phase(pod, phase)]
            return len(found) >= number

        until(there, patience, lambda: f"{len(found)} of {number} pods {phase}: {self._describe(namespace)}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def _describe(self, namespace: str) -> str:
        return self.kubectl("get", "pods,events", "-n", namespace, "-o", "wide") + self._logs()

    def delete_namespace(self, *names: str) -> None:
        """Delete namespaces with all that is in them, and wait until they are gone."""
        self.kubectl("delete", "namespace", "--ignore-not-found", "--wait=true", *names)

    def exec(self, namespace: str, pod: str, *argv: str) -> str:
        """Run a command in a pod's first container, and return its output. Raises HostError."""
        return self.kubectl("exec", "-n", namespace, pod, "--", *argv)

    def node_of(self, pod: dict[str, Any]) -> Node:
        """The node of a pod that `get` or `wait_pods` gave."""
        return next(node for node in self.nodes if node.name == pod["spec"]["nodeName"])

    def serve_traffic(self, hosts: Iterable[Host], *ports: int) -> None:
        """Let hosts answer `traffic` at these ports, all their addresses, both families."""
        for host in hosts:
            host.serve(RECEIVERS, [str(self.traffic), "serve", *map(str, ports)])

    def truth(self) -> dict[str, dict[PodId, Flows]]:
        """What the pods of each node sent and received, by the node's name."""
        return {node.name: node.truth.read() for node in self.nodes}

    def settled_truth(self, patience: float = 120.0) -> dict[str, dict[PodId, Flows]]:
        """The same, when no pod has sent or received anything for longer than the agent's readings are old."""
        end = time.monotonic() + patience
        before = self.truth()
        while True:
            time.sleep(_QUIET)
            now = self.truth()
            if now == before:
                return now
            if time.monotonic() > end:
                raise HostError("pods do not become quiet")
            before = now

    def translations(self, node: Node) -> Translations:
        """What a node translates: by the services and hostPorts of now (if the API server answers) and of earlier."""
        known = self._translations.setdefault(node.name, Translations(node.own_addresses()))
        with contextlib.suppress(HostError):
            for service in self.get("services"):
                # all services but this have pods behind them
                own = service["metadata"]["name"] == "kubernetes" and service["metadata"]["namespace"] == "default"
                known.services |= dict.fromkeys(service["spec"].get("clusterIPs", []), "node" if own else "pod")
            for pod in self.get("pods"):
                if pod["spec"].get("nodeName") == node.name and not pod["spec"].get("hostNetwork"):
                    known.host_ports |= _host_ports(pod)
        return known

    def measure(self, patience: float = 120.0) -> Measurement:
        """What pods sent and what running agents counted so far, by node, read while nothing is sent.

        Until what pods counted is the same before and after the scrapes, it is done again. Raises HostError when that
        does not happen.
        """
        end = time.monotonic() + patience
        while True:
            before = self.settled_truth(patience)
            counted = {node.name: agent.totals() for node, agent in self._running()}
            if self.truth() == before:
                break
            if time.monotonic() > end:
                raise HostError("pods do not become quiet")
        nodes = [node for node, _ in self._running()]
        sent = {node.name: classes.expected(before[node.name], self.translations(node)) for node in nodes}
        return Measurement(sent, counted)

    def differences(self, since: Measurement | None = None, patience: float = 120.0) -> list[Difference]:
        """Every pod series of every running agent that is not what pods sent and received, to the byte and packet.

        Args:
            since: judge only what was added to this measurement, of agents that were running then.
            patience: seconds for pods to become quiet.
        """
        now = self.measure(patience)
        found: list[Difference] = []
        for node, counted in now.counted.items():
            if since is None:
                found += classes.differences(node, now.sent[node], counted)
            elif node in since.counted:
                sent = classes.since(now.sent[node], since.sent[node])
                found += classes.differences(node, sent, classes.since(counted, since.counted[node]))
        return found

    def assert_exact(self, since: Measurement | None = None) -> None:
        """Fail unless every pod series of every running agent is exact; the failure shows the ones that are not."""
        rows = self.differences(since)
        assert not rows, f"{len(rows)} series differ:\n{classes.table(rows)}"

    def _running(self) -> list[tuple[Node, Agent]]:
        return [(node, agent) for node, agent in zip(self.nodes, self.agents, strict=True) if agent.runs]

    def wait(self, condition: Callable[[], object], patience: float = 120.0, complaint: str = "did not happen") -> None:
        """Wait until a condition holds. Raises HostError."""
        until(condition, patience, complaint)


def _routes(number: int) -> list[str]:
    """The way to the pods of a node."""
    addresses, ranges = plan.host(number), plan.pods(number)
    return [f"{ranges[family]} via {addresses[family]}" for family in plan.FAMILIES]


def _in_phase(pod: dict[str, Any], phase: str) -> bool:
    if pod["status"].get("phase") != phase or "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = pod["status"].get("conditions", [])
    return phase != "Running" or any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _host_ports(pod: dict[str, Any]) -> dict[int, int]:
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports", []))
    return {port["hostPort"]: port["containerPort"] for port in ports if "hostPort" in port}
