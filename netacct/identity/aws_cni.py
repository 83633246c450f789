"""The source `aws-cni`: pods from the checkpoint of the AWS VPC CNI's address manager, ipamd (since its version 1.12).

`/var/run/aws-node/ipam.json` (github.com/aws/amazon-vpc-cni-k8s, pkg/ipamd/datastore/data_store.go, CheckpointData):

    {"version": "vpc-cni-ipam/1", "allocations": [{"networkName": "aws-cni", "containerID": "…", "ifName": "eth0",
     "ipv4": "10.0.1.5", "allocationTimestamp": 1730000000000000000,
     "metadata": {"k8sPodNamespace": "team-a", "k8sPodName": "train-0"}}]}

It has no uids. Pods with security groups of their own (branch interfaces) are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netacct.identity.state_file import PATIENCE, Entry, StateFileSource, entry, mapping, sequence

SOURCE = "aws-cni"

CHECKPOINT = "/var/run/aws-node/ipam.json"

VERSION = "vpc-cni-ipam/1"

_INT64 = 1 << 63  # allocationTimestamp is Go's int64


def decode(document: Mapping[str, Any]) -> Iterator[Entry]:
    """The pods in a checkpoint. Raises ValueError where it is of another version."""
    if document.get("version") != VERSION:
        raise ValueError(f"has the version {str(document.get('version'))[:40]!r}, not {VERSION!r}")
    for allocation in map(mapping, sequence(document.get("allocations"))):
        metadata = mapping(allocation.get("metadata"))
        when = allocation.get("allocationTimestamp")
        made = when / 1e9 if isinstance(when, int) and 0 < when < _INT64 else None
        for family in ("ipv4", "ipv6"):
            if allocation.get(family):
                whose = (metadata.get("k8sPodNamespace"), metadata.get("k8sPodName"), allocation.get("containerID"))
                found = entry(allocation[family], *whose, made)
                if found:
                    yield found


class AwsCniSource(StateFileSource):
    """Follows the checkpoint. See StateFileSource for what it tells, and when.

    Args:
        checkpoint: its path.
        patience: seconds that other sources have to vouch for an address.
    """

    def __init__(self, checkpoint: str = CHECKPOINT, patience: float = PATIENCE) -> None:
        super().__init__(SOURCE, {checkpoint: decode}, patience)
