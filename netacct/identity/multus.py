"""The addresses that a pod has in secondary networks, from the annotation that Multus writes about them: pure.

The annotation is a list of networks, each with `name` (NAMESPACE/NAME of its NetworkAttachmentDefinition), `ips`, and
`default: true` for the one whose addresses are also the pod's own (Network Plumbing Working Group, Kubernetes Network
Custom Resource Definition De-facto Standard 1.3, section 3.7).

Addresses of one network may be those of another, or of other pods, and most secondary networks (macvlan, SR-IOV) pass
netfilter of the node by. So none is believed but those of networks that somebody named.
"""

from __future__ import annotations

import json
from collections.abc import Collection

STATUS = "k8s.v1.cni.cncf.io/network-status"
"""The annotation's name."""

SIZE_LIMIT = 65536
"""Characters; a network takes some hundred."""


def secondary(annotation: str, networks: Collection[str]) -> list[str]:
    """The addresses, in text form, that this annotation gives a pod in these networks; none where it is malformed.

    Args:
        annotation: its text.
        networks: names of networks, as NAMESPACE/NAME.
    """
    try:
        found = json.loads(annotation) if annotation and len(annotation) <= SIZE_LIMIT else []
    except (ValueError, RecursionError):
        return []
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    named = [entry for entry in entries if isinstance(entry.get("name"), str) and entry["name"] in networks]
    wanted = [entry for entry in named if entry.get("default") is not True]
    several = [entry["ips"] for entry in wanted if isinstance(entry.get("ips"), list)]
    return [ip for ips in several for ip in ips if isinstance(ip, str)]
