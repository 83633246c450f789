"""The source `azure-cni`: pods from the state of Azure's CNI plugin, and of the service that gives it addresses (CNS).

Two files, of which a node has one or both (github.com/Azure/azure-container-networking):

    /var/run/azure-vnet.json                 the plugin's own state (platform/os_linux.go; network/endpoint.go)
    /var/run/azure-cns/azure-endpoints.json  CNS's, where it keeps the endpoints (cns/restserver/restserver.go)

Neither has uids, nor the time at which a pod got its address: that is when the file was written in which it first
appeared. Addresses are given again at once, at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from netacct.identity.state_file import PATIENCE, Entry, StateFileSource, entry, mapping, sequence

SOURCE = "azure-cni"

STATE = "/var/run/azure-vnet.json"

ENDPOINTS = "/var/run/azure-cns/azure-endpoints.json"

_PRIMARY = ("", "InfraNIC")
"""The kinds of an endpoint's interface (cns/api.go, NICType) that carry its pod's address; others pass the node by."""


def decode_state(document: Mapping[str, Any]) -> Iterator[Entry]:
    """The pods in the plugin's state. Raises ValueError where it has another form."""
    if "Network" not in document:
        raise ValueError("has no Network")
    for interface in mapping(mapping(document["Network"]).get("ExternalInterfaces")).values():
        for network in mapping(mapping(interface).get("Networks")).values():
            for endpoint in mapping(mapping(network).get("Endpoints")).values():
                fields = mapping(endpoint)
                whose = (fields.get("PODNameSpace"), fields.get("PODName"), fields.get("ContainerID"))
                yield from _entries(fields.get("IPAddresses"), *whose)


def decode_endpoints(document: Mapping[str, Any]) -> Iterator[Entry]:
    """The pods in CNS's state. Raises ValueError where it has another form."""
    if "Endpoints" not in document:
        raise ValueError("has no Endpoints")
    for container, endpoint in mapping(document["Endpoints"]).items():
        fields = mapping(endpoint)
        for interface in map(mapping, mapping(fields.get("IfnameToIPMap")).values()):
            if interface.get("NICType", "") in _PRIMARY:
                whose = (fields.get("PodNamespace"), fields.get("PodName"), container)
                yield from _entries(interface.get("IPv4"), *whose)
                yield from _entries(interface.get("IPv6"), *whose)


def _entries(addresses: object, namespace: object, name: object, sandbox: object) -> Iterator[Entry]:
    """Of a list of Go's net.IPNet, `{"IP": "10.0.0.4", "Mask": "//8AAA=="}`."""
    for address in sequence(addresses):
        found = entry(mapping(address).get("IP"), namespace, name, sandbox)
        if found:
            yield found


class AzureCniSource(StateFileSource):
    """Follows both files. See StateFileSource for what it tells, and when.

    Args:
        state: path of the plugin's state.
        endpoints: path of CNS's.
        patience: seconds that other sources have to vouch for an address.
    """

    def __init__(self, state: str = STATE, endpoints: str = ENDPOINTS, patience: float = PATIENCE) -> None:
        super().__init__(SOURCE, {state: decode_state, endpoints: decode_endpoints}, patience)
