"""Local ranges by Azure's metadata service, against a local one that answers in its documented form."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

import pytest
from metadata_server import PATIENCE, Asked, Reply, serving

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_azure import Azure
from netacct.identity.ranges_metadata import POLL, Known, UnansweredError


def interface(*v4: str, v6: tuple[str, ...] = (), subnet: tuple[str, str] = ("10.1.0.0", "24")) -> dict[str, Any]:
    """An interface as the service shows it."""
    return {
        "ipv4": {
            "ipAddress": [{"privateIpAddress": ip, "publicIpAddress": ""} for ip in v4],
            "subnet": [{"address": subnet[0], "prefix": subnet[1]}],
        },
        "ipv6": {"ipAddress": [{"privateIpAddress": ip} for ip in v6]},
        "macAddress": "000D3AF806EC",
    }


def service(*interfaces: Any) -> Any:
    """The metadata service: refuses what it documents to refuse."""

    def answer(asked: Asked) -> Reply:
        url = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if asked.headers.get("metadata") != "true" or "x-forwarded-for" in asked.headers or "api-version" not in query:
            return Reply('{"error": "Bad request"}', 400)
        if url.path != "/metadata/instance/network" or query.get("format") != "json":
            return Reply('{"error": "Not found"}', 404)
        return Reply(json.dumps({"interface": interfaces}), headers={"Content-Type": "application/json"})

    return answer


def ask(answer: Any) -> Known:
    """What is known by one answer."""
    with serving(answer) as server:
        client = MetadataClient([server.url], PATIENCE)
        try:
            return Azure().ask(client)
        finally:
            client.close()


def ranges(*interfaces: Any) -> list[str]:
    """The ranges of a VM with these interfaces."""
    return [str(network) for network in ask(service(*interfaces)).ranges]


def test_secondary_addresses_are_pods() -> None:
    """All addresses of an interface but its first are local ranges: the first is the node's."""
    assert ranges(interface("10.1.0.4", "10.1.0.5", "10.1.0.6")) == ["10.1.0.5/32", "10.1.0.6/32"]
    assert ranges(interface("10.1.0.4")) == []
    assert ranges(interface()) == []


def test_several_interfaces_and_ipv6() -> None:
    """The first address of each interface and family is the node's."""
    first = interface("10.1.0.4", "10.1.0.5", v6=("fd00::4", "fd00::5"))
    second = interface("10.2.0.4", "10.2.0.9", subnet=("10.2.0.0", "16"))
    assert ranges(first, second) == ["10.1.0.5/32", "fd00::5/128", "10.2.0.9/32"]


def test_subnets_are_facts() -> None:
    """The subnet of each interface is a fact, and the service is asked again after a minute or more."""
    known = ask(service(interface("10.1.0.4"), interface("10.2.0.4", subnet=("10.2.0.0", "16"))))
    assert [(str(fact.network), fact.kind, fact.words) for fact in known.facts] == [
        ("10.1.0.0/24", "subnet", "found in Azure metadata (interface 0)"),
        ("10.2.0.0/16", "subnet", "found in Azure metadata (interface 1)"),
    ]
    assert known.pause >= POLL == 60.0


@pytest.mark.parametrize("missing", [{}, {"ipv4": None, "ipv6": None}, {"ipv4": {"ipAddress": []}}])
def test_an_interface_without_addresses(missing: dict[str, Any]) -> None:
    """An interface of which nothing is told adds nothing, and does no harm to the others."""
    assert ranges(missing, interface("10.1.0.4", "10.1.0.5")) == ["10.1.0.5/32"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "not JSON"),
        ("[]", "no list of interfaces"),
        ("{}", "no list of interfaces"),
        ('{"interface": {}}', "no list of objects"),
        ('{"interface": []}', "names no interface"),
        ('{"interface": null}', "names no interface"),
        ('{"interface": [{"ipv4": [1]}]}', "no object"),
        ('{"interface": [{"ipv4": {"ipAddress": [{"publicIpAddress": ""}]}}]}', "in place of an address"),
        ('{"interface": [{"ipv4": {"ipAddress": [{"privateIpAddress": ""}]}}]}', "in place of an address"),
        ('{"interface": [{"ipv4": {"subnet": [{"address": "10.1.0.0", "prefix": "99"}]}}]}', "in place of an address"),
    ],
)
def test_garbage_is_no_answer(body: str, why: str) -> None:
    """What is not of the documented form is refused as a whole, and the words say why."""
    with pytest.raises(UnansweredError, match=why):
        ask(lambda _: Reply(body))


def test_a_rate_limit_says_when_to_come_back() -> None:
    """A 429 is no answer, and carries the seconds of Retry-After."""
    with pytest.raises(UnansweredError, match="429 Too Many Requests") as caught:
        ask(lambda _: Reply(status=429, headers={"Retry-After": "42"}))
    assert caught.value.retry_after == 42.0
