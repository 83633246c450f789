"""The files that a user would write for the demo's node: configuration, policy, pods. Texts, from plain data."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from netacct.demo.world import ADDRESSES, CLASSES, FAMILIES, LOCAL_RANGES, PODS

PORT = 19112

_CONFIG = """\
policy: {folder}/policy.yaml
datapath: {datapath}
{identity}
metrics: {{zero_first: 0s}}  # the difference of two scrapes must hold every byte between them
state_dir: {folder}/state
accounts_dir: {folder}/accounts
web: {{listen_address: ["127.0.0.1:{port}"]}}
log: {{level: info, format: logfmt}}
"""
_BY_FILE = """\
local_ranges: ["{range4}", "{range6}"]
ranges: {{providers: []}}
identity: {{sources: [file], file: {{path: {folder}/pods.yaml}}}}"""
_BY_CNI = """\
ranges: {{providers: [cni], cni: {{directories: [{folder}/cni/net.d]}}}}
identity:
  sources: [file, cni]  # the file for owners and labels, which CNI does not know
  file: {{path: {folder}/pods.yaml}}
  cni: {{directories: [{folder}/cni/results]}}"""
_POLICY = """\
classes:
{classes}
  private: {{builtin: private}}
default: internet
tunnel: {{udp: [4789]}}
marks: {{mask: 0x0000001f, values: {{pod: 1, node: 2, service: 3, private: 4, internet: 5, storage: 6}}}}
"""


def config(folder: Path, datapath: str, *, cni: bool) -> str:
    """netacct.yaml; everything that the agent writes stays below `folder`.

    Args:
        folder: of the demo.
        datapath: the setting.
        cni: pods are made by CNI, whose files lie in `folder`/cni: local ranges and addresses are found there.
    """
    known = {"folder": folder, "range4": LOCAL_RANGES[4], "range6": LOCAL_RANGES[6]}
    identity = (_BY_CNI if cni else _BY_FILE).format(**known)
    return _CONFIG.format(**known, datapath=datapath, port=PORT, identity=identity)


def policy() -> str:
    """policy.yaml, with a class of the demo's own inside of `private`."""
    lines = (f"  {name}: {{cidrs: [{', '.join(_quoted(cidrs))}]}}" for name, cidrs in CLASSES.items())
    return _POLICY.format(classes="\n".join(lines))


def pods(names: Collection[str]) -> str:
    """pods.yaml with these pods, at their addresses of both families."""
    return "\n".join(["pods:", *(_pod(name) for name in names), ""])


def _pod(name: str) -> str:
    pod = PODS[name]
    ips = ", ".join(_quoted([ADDRESSES[family][name] for family in FAMILIES]))
    return (
        f"  - {{namespace: {pod.namespace}, name: {pod.name}, uid: demo-{pod.name}, ips: [{ips}], phase: Running,\n"
        f"     labels: {{experiment: demo}}, owner: {{kind: {pod.kind}, name: {pod.workload}}}}}"
    )


def _quoted(texts: Collection[str]) -> list[str]:
    return [f'"{text}"' for text in texts]
