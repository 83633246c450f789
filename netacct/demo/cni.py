"""Makes pods as a container runtime does: with the real CNI plugin `ptp` and its IPAM host-local, both families.

Where the CNI project's cnitool is there, it goes through libcni, which writes the result cache that the agent reads.
The plugins alone write none: then this module writes the file that libcni would have written, in its format.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netacct.demo.netns import DemoError, Namespace
from netacct.demo.world import ADDRESSES, FAMILIES, LOCAL_RANGES, PODS

PLUGIN_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
"""Debian's, the one of most Kubernetes nodes, and Fedora's."""

_NEEDED = ("ptp", "host-local")
_CHECKOUT_TOOL = Path(__file__).parents[2] / ".tools" / "bin" / "cnitool"
_NETWORK = "demo"

# cnitool keeps its cache in /var/lib/cni and nowhere else, so it gets a mount namespace in which our folder lies there.
_ENTER = 'mount -t tmpfs none /var/lib && mkdir /var/lib/cni && mount --bind "$0" /var/lib/cni && exec "$@"'


def plugins() -> Path | None:
    """The folder with the plugins that are needed; None where there is none."""
    for folder in map(Path, PLUGIN_FOLDERS):
        if all(os.access(folder / name, os.X_OK) for name in _NEEDED):
            return folder
    return None


def cnitool() -> Path | None:
    """The program that drives plugins through libcni; None where there is none."""
    found = shutil.which("cnitool") or (_CHECKOUT_TOOL if os.access(_CHECKOUT_TOOL, os.X_OK) else None)
    return None if found is None else Path(found)


class Cni:
    """Gives pods their interface, in a node's namespace, with all files in a folder of the demo's.

    Args:
        node: the node.
        folder: where `net.d` (configuration) and `results` (the cache) are made.
        binaries: the folder of the plugins.
        tool: cnitool, or None to call the plugin itself.
    """

    def __init__(self, node: Namespace, folder: Path, binaries: Path, tool: Path | None) -> None:
        self._node, self._folder, self._binaries, self._tool = node, folder, binaries, tool
        (folder / "net.d").mkdir(parents=True)
        (folder / "net.d" / "10-demo.conflist").write_text(json.dumps(self._network()), encoding="ascii")
        (folder / "results").mkdir(mode=0o700)

    def add(self, pod: str, space: Namespace) -> None:
        """ADD: the pod gets its addresses. Raises DemoError with what the plugin said."""
        if self._tool:
            self._run_tool("add", pod, space)
            return
        result = self._run_plugin("ADD", pod, space)
        cached = {
            "kind": "cniCacheV1",
            "containerId": _container(pod),
            "config": "",
            "ifName": "eth0",
            "networkName": _NETWORK,
            "netns": space.path,
            "cniArgs": [list(pair) for pair in _arguments(pod).items()],
            "capabilityArgs": _capabilities(pod),
            "result": json.loads(result),
        }
        self._cache_file(pod).write_text(json.dumps(cached), encoding="ascii")

    def delete(self, pod: str, space: Namespace) -> None:
        """DEL: the pod's addresses are free again. Raises DemoError with what the plugin said."""
        if self._tool:
            self._run_tool("del", pod, space)
            return
        self._run_plugin("DEL", pod, space)
        self._cache_file(pod).unlink()

    def _network(self) -> dict[str, Any]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self._folder / "networks"),
            "ranges": [[{"subnet": LOCAL_RANGES[family]}] for family in FAMILIES],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }
        plugin = {"type": "ptp", "capabilities": {"ips": True}, "ipam": ipam}
        return {"cniVersion": "1.0.0", "name": _NETWORK, "plugins": [plugin]}

    def _cache_file(self, pod: str) -> Path:
        return self._folder / "results" / f"{_NETWORK}-{_container(pod)}-eth0"

    def _run_tool(self, verb: str, pod: str, space: Namespace) -> None:
        environ = {
            "NETCONFPATH": str(self._folder / "net.d"),
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in _arguments(pod).items()),
            "CAP_ARGS": json.dumps(_capabilities(pod)),
        }
        inside = ["sh", "-c", _ENTER, str(self._folder), str(self._tool), verb, _NETWORK, space.path]
        self._run(["unshare", "--mount", *inside], environ, "")

    def _run_plugin(self, verb: str, pod: str, space: Namespace) -> str:
        network = self._network()
        plugin = {key: value for key, value in network["plugins"][0].items() if key != "capabilities"}
        head = {"cniVersion": network["cniVersion"], "name": _NETWORK, "runtimeConfig": _capabilities(pod)}
        environ = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": _container(pod),
            "CNI_NETNS": space.path,
            "CNI_IFNAME": "eth0",
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in _arguments(pod).items()),
        }
        return self._run([str(self._binaries / "ptp")], environ, json.dumps({**head, **plugin}))

    def _run(self, command: list[str], environ: Mapping[str, str], text: str) -> str:
        whole = {**os.environ, "CNI_PATH": str(self._binaries), **environ}
        with self._node.entered():
            done = subprocess.run(
                command, env=whole, input=text, capture_output=True, text=True, check=False, timeout=60
            )
        if done.returncode != 0:
            raise DemoError(f"CNI, {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def _container(pod: str) -> str:
    return f"demo-sandbox-{pod}"


def _arguments(pod: str) -> dict[str, str]:
    """What a runtime tells plugins of a pod."""
    return {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": PODS[pod].namespace,
        "K8S_POD_NAME": pod,
        "K8S_POD_INFRA_CONTAINER_ID": _container(pod),
        "K8S_POD_UID": f"demo-{pod}",
    }


def _capabilities(pod: str) -> dict[str, list[str]]:
    """The addresses that it shall get: a demo of known traffic needs known ones."""
    return {"ips": [f"{ADDRESSES[family][pod]}/{LOCAL_RANGES[family].partition('/')[2]}" for family in FAMILIES]}
