"""The manifests in deploy/ against the agent's defaults, the unit, the documentation and each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_image
import pytest
import yaml

from netacct import __version__, config, service
from netacct.cli import parser
from netacct.doctor.look import process
from netacct.identity import cni_cache, cri, kubelet_pods_api, ranges_cni
from netacct.kernel.lock import DEFAULT_PATH

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text(encoding="utf-8")
IDENTITY = (ROOT / "docs" / "identity.md").read_text(encoding="utf-8")
KEPT = {"/etc/netacct", "/tmp"}  # noqa: S108 -- a mount of the pod
"""What is mounted, and is nobody's on the node."""


def objects(name: str) -> list[dict[str, Any]]:
    """What a manifest has."""
    return list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text(encoding="utf-8")))


def one(name: str, kind: str) -> dict[str, Any]:
    """The only object of a kind in a manifest."""
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return found


def pod(name: str) -> dict[str, Any]:
    """The pod of a manifest's DaemonSet."""
    spec: dict[str, Any] = one(name, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def agent() -> dict[str, Any]:
    """The container that runs the agent."""
    (container,) = pod("daemonset")["containers"]
    return dict(container)


def mounts() -> dict[str, dict[str, Any]]:
    """The mounts of the agent by path, with what the volume says."""
    volumes = {each["name"]: each for each in pod("daemonset")["volumes"]}
    return {each["mountPath"]: {**volumes[each["name"]], **each} for each in agent()["volumeMounts"]}


def values(document: object) -> Iterator[object]:
    """Every value in a document, at any depth."""
    yield document
    if isinstance(document, dict | list):
        for each in document.values() if isinstance(document, dict) else document:
            yield from values(each)


@pytest.mark.parametrize("name", ["daemonset", "remove"])
def test_nothing_is_granted_but_two_capabilities(name: str) -> None:
    """No container is privileged or can become more, each is read-only, and those that touch rules have the two."""
    spec = pod(name)
    granted = []
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        security = container["securityContext"]
        assert not security.get("privileged")
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        added = {f"CAP_{each}" for each in security["capabilities"].get("add", [])}
        granted.append((added, security["runAsUser"]))
    assert granted.pop() == (set(process._CAPABILITIES), 0)
    assert all(not added and user for added, user in granted)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec.get("hostPID")
    assert not spec.get("hostIPC")


@pytest.mark.parametrize("name", ["daemonset", "remove"])
def test_no_token_is_mounted(name: str) -> None:
    """The pods reach no API server, whatever the ServiceAccount may do."""
    assert pod(name)["automountServiceAccountToken"] is False
    assert one("daemonset", "ServiceAccount")["automountServiceAccountToken"] is False
    assert not any(each["kind"].startswith(("Role", "ClusterRole")) for each in objects(name))


def test_every_path_of_the_node_is_the_agents_default() -> None:
    """What is mounted from the node is where the agent looks by default, and at the same path inside."""
    defaults = config.load()
    wanted = {
        defaults.state_dir,
        defaults.accounts_dir,
        DEFAULT_PATH,
        str(Path(cni_cache.DIRECTORIES[0]).parent),
        cni_cache.CONFIGURATION[0],
        str(Path(kubelet_pods_api.SOCKETS[0]).parent),
        str(Path(ranges_cni.FLANNEL).parent),
        "/run/netns",
    }
    from_node = {path: each["hostPath"]["path"] for path, each in mounts().items() if "hostPath" in each}
    assert from_node == {path: path for path in wanted}
    assert mounts().keys() == wanted | KEPT
    assert str(Path(config.DEFAULT_PATH).parent) in KEPT


def test_only_what_is_written_can_be_written() -> None:
    """State, accounts and the lock are writable; a missing place on the node is made and ends no pod."""
    writable = {path for path, each in mounts().items() if not each.get("readOnly")}
    assert writable == {"/run/netacct", "/var/lib/netacct", DEFAULT_PATH, "/tmp"}  # noqa: S108 -- as above
    for path, each in mounts().items():
        if "hostPath" in each:
            assert each["hostPath"]["type"] == ("FileOrCreate" if path == DEFAULT_PATH else "DirectoryOrCreate")
    assert mounts()["/run/netns"]["mountPropagation"] == "HostToContainer"


@pytest.mark.parametrize("name", ["daemonset", "remove"])
def test_no_socket_that_makes_its_owner_root(name: str) -> None:
    """No mount has the socket of a container runtime in or below it, or the kubelet's keys."""
    mounted = [Path(each["hostPath"]["path"]) for each in pod(name)["volumes"] if "hostPath" in each]
    for secret in (*cri.SOCKETS, "/var/lib/kubelet/pki", "/var/run/docker.sock", "/run/docker.sock"):
        assert not any(path in (Path(secret), *Path(secret).parents) for path in mounted)


def test_the_removal_has_what_the_agent_had() -> None:
    """The container that removes rules has image, configuration, state and lock of the agent's."""
    (remover,) = pod("remove")["initContainers"]
    assert parser().parse_args(remover["args"]).run
    volumes = {each["name"]: each.get("hostPath", {}).get("path") for each in pod("remove")["volumes"]}
    inside = {each["mountPath"]: volumes[each["name"]] for each in remover["volumeMounts"]}
    assert inside == {"/etc/netacct": None, "/run/netacct": "/run/netacct", "/var/lib/netacct": "/var/lib/netacct"} | {
        DEFAULT_PATH: DEFAULT_PATH
    }
    images = {each["image"] for each in [remover, *pod("remove")["containers"]]}
    assert images == {agent()["image"]}
    for key in ("tolerations", "nodeSelector", "affinity", "hostNetwork", "priorityClassName"):
        assert pod("remove")[key] == pod("daemonset")[key]


def test_the_shipped_configuration_is_valid(tmp_path: Path) -> None:
    """The ConfigMap has the agent's file by its default name, and the agent takes it."""
    data = one("daemonset", "ConfigMap")["data"]
    assert data.keys() == {Path(config.DEFAULT_PATH).name}
    path = tmp_path / "netacct.yaml"
    path.write_text(data["netacct.yaml"])
    assert config.load(str(path)).enabled


def test_port_and_probes_are_the_agents() -> None:
    """Port, paths and command are the ones that the agent has, and /livez is as patient as the unit's watchdog."""
    container = agent()
    (port,) = container["ports"]
    assert [f":{port['containerPort']}"] == [str(each) for each in config.load().web.listen_address]
    assert port["containerPort"] == port["hostPort"]
    assert parser().parse_args(container["args"]).run
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    paths = {key: probe["httpGet"]["path"] for key, probe in probes.items()}
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    unit = (ROOT / "systemd" / "netacct.service").read_text(encoding="utf-8")
    assert f"WatchdogSec={service.LIVE_SECONDS:.0f}s" in unit
    assert container["resources"]["limits"] == {"memory": "256Mi"}
    assert "MemoryMax=256M" in unit


def test_two_agents_are_never_on_a_node() -> None:
    """An update ends the old pod before it starts the new one, on every node, also on those that nothing tolerates."""
    spec = one("daemonset", "DaemonSet")["spec"]
    assert spec["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    assert pod("daemonset")["tolerations"] == [{"operator": "Exists"}]
    assert pod("daemonset")["hostNetwork"] is True


def test_the_image_is_the_one_that_is_built() -> None:
    """The manifests name the image that `make image` makes of this version by default."""
    assert agent()["image"] == build_image.default_name() == f"localhost/netacct:{__version__}"


@pytest.mark.parametrize(("name", "section"), [("rbac-kubelet", "## kubelet\n"), ("rbac-apiserver", "## apiserver\n")])
def test_rights_are_those_of_the_documentation(name: str, section: str) -> None:
    """A file of rights has the objects that the page on identity shows."""
    shown = IDENTITY.split(f"\n{section}")[1].split("```yaml\n")[1].split("```")[0]
    assert objects(name) == list(yaml.safe_load_all(shown))


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_nobody_may_run_commands_in_containers(path: Path) -> None:
    """No manifest grants a wildcard, nodes/proxy, exec or secrets, or a verb that writes."""
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if each["kind"] == "ClusterRole":
            for rule in each["rules"]:
                assert set(rule["resources"]) <= {"nodes/pods", "pods", "nodes"}
                assert set(rule["verbs"]) <= {"get", "list", "watch"}
        assert "nodes/proxy" not in list(values(each))
        assert each.get("metadata", {}).get("namespace", "netacct") == "netacct"


def test_the_scrape_keeps_the_accounted_pods_labels() -> None:
    """The PodMonitor selects the agent's pods and port, honours its labels, and drops those of the scraped pod."""
    (endpoint,) = one("podmonitor", "PodMonitor")["spec"]["podMetricsEndpoints"]
    labels = one("daemonset", "DaemonSet")["spec"]["template"]["metadata"]
    assert one("podmonitor", "PodMonitor")["spec"]["selector"]["matchLabels"] == labels["labels"]
    assert endpoint["port"] == agent()["ports"][0]["name"]
    assert endpoint["path"] == config.load().web.telemetry_path
    assert endpoint["honorLabels"] is True
    (drop,) = (each["regex"] for each in endpoint["relabelings"] if each.get("action") == "labeldrop")
    assert all(re.fullmatch(drop, name) for name in ("namespace", "pod", "container"))
    assert "annotations" not in labels


def test_the_quota_admits_the_priority_of_the_pods() -> None:
    """Where a cluster asks for a quota of that class, this one lets agents and the removal run in their namespace."""
    quota = one("resourcequota", "ResourceQuota")
    (scope,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert (scope["scopeName"], scope["operator"]) == ("PriorityClass", "In")
    for name in ("daemonset", "remove"):
        assert pod(name)["priorityClassName"] in scope["values"]
        assert one(name, "DaemonSet")["metadata"]["namespace"] == quota["metadata"]["namespace"]


def test_every_mount_and_file_is_documented() -> None:
    """The README names each mount of the agent, and each file of the folder."""
    table = README.split("## Mounts")[1].split("To be added")[0].split("`mountPropagation")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == mounts().keys()
    files = {path.name for path in DEPLOY.iterdir() if path.name != "README.md"}
    assert files == {name for name in files if f"`{name}`" in README}


def test_the_dockerfile_installs_what_the_image_has() -> None:
    """It builds the same wheels, of the same sources, and starts the same command."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        word.removeprefix("./") for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()
    }
    assert copied == {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "netacct", "rules"}
    assert 'ENTRYPOINT ["/usr/local/bin/netacct"]\nCMD ["run"]\n' in text
    assert "iptables" in text


def test_an_image_can_be_built_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine that has a copy of the sources and no git, files have the time 0; a given time wins."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_image.time_of_files() == 0
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert build_image.time_of_files() == 1700000000
