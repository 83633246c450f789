"""Local ranges by EC2's metadata service (IMDSv2), against a local one that answers in its documented form."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest
from metadata_server import PATIENCE, Asked, Reply, serving

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_aws import Aws
from netacct.identity.ranges_metadata import POLL, Known, UnansweredError

MACS = "/latest/meta-data/network/interfaces/macs/"
FIRST, SECOND = "02:29:96:8f:6a:2d", "06:c3:d8:44:e4:03"

VPC = {
    "subnet-ipv4-cidr-block": "10.0.32.0/20",
    "vpc-ipv4-cidr-block": "10.0.0.0/16",
    "vpc-ipv4-cidr-blocks": "10.0.0.0/16\n100.64.0.0/16",
}
OTHERS = {"device-number": "0", "interface-id": "eni-0123", "ipv4-associations/": ""}


class Ec2:
    """The metadata service: tells nothing without a token, and takes each token `uses` times."""

    def __init__(self, interfaces: Mapping[str, Mapping[str, str]], uses: int = 1000) -> None:
        self.interfaces = interfaces
        self.uses = uses
        self.left: dict[str, int] = {}

    def __call__(self, asked: Asked) -> Reply:
        """Answer one request."""
        if asked.path == "/latest/api/token":
            return self._token(asked)
        token = asked.headers.get("x-aws-ec2-metadata-token", "")
        if not self.left.get(token):
            return Reply("", 401)
        self.left[token] -= 1
        if not asked.path.startswith(MACS):
            return Reply("", 404)
        mac, _, name = asked.path.removeprefix(MACS).partition("/")
        if not mac:
            return Reply("\n".join(f"{each}/" for each in self.interfaces))
        there = self.interfaces.get(mac)
        if there is None or (name and name not in there):
            return Reply("<?xml version='1.0'?><h1>404 - Not Found</h1>", 404)
        return Reply(there[name] if name else "\n".join(there))

    def _token(self, asked: Asked) -> Reply:
        ttl = asked.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if asked.method != "PUT" or "x-forwarded-for" in asked.headers:
            return Reply("", 403)
        if not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
            return Reply("", 400)
        token = f"AQAEAL{len(self.left)}=="
        self.left[token] = self.uses
        return Reply(token)


def ask(interfaces: Mapping[str, Mapping[str, str]]) -> Known:
    """What is known of an instance with these interfaces."""
    with serving(Ec2(interfaces)) as server:
        client = MetadataClient([server.url], PATIENCE)
        try:
            return Aws().ask(client)
        finally:
            client.close()


def ranges(interfaces: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The local ranges of an instance with these interfaces."""
    return [str(network) for network in ask(interfaces).ranges]


def test_secondary_addresses_are_pods() -> None:
    """All addresses of an interface but its first are local ranges, and so for each interface."""
    first = {"local-ipv4s": "10.0.32.4\n10.0.32.5\n10.0.32.6", **VPC, **OTHERS}
    second = {"local-ipv4s": "10.0.48.4\n10.0.48.9\n", **VPC, **OTHERS}
    assert ranges({FIRST: first, SECOND: second}) == ["10.0.32.5/32", "10.0.32.6/32", "10.0.48.9/32"]
    assert ranges({FIRST: {"local-ipv4s": "10.0.32.4", **VPC, **OTHERS}}) == []


def test_delegated_prefixes_are_pods() -> None:
    """Prefixes of both families are local ranges whole, and the interface's own IPv6 address is the node's."""
    found = ranges(
        {
            FIRST: {
                "local-ipv4s": "10.0.32.4",
                "ipv4-prefix": "10.0.33.0/28\n10.0.34.16/28",
                "ipv6s": "2600:1f14:a::4",
                "ipv6-prefix": "2600:1f14:a:b:c::/80",
            }
        }
    )
    assert found == ["10.0.33.0/28", "10.0.34.16/28", "2600:1f14:a:b:c::/80"]


def test_the_vpc_is_a_fact() -> None:
    """The CIDRs of VPC and subnet, of both families, are facts, each once, and the service is polled once a minute."""
    v6 = {"vpc-ipv6-cidr-blocks": "2600:1f14:a::/56", "subnet-ipv6-cidr-blocks": "2600:1f14:a:b::/64"}
    known = ask({FIRST: {"local-ipv4s": "10.0.32.4", **VPC, **v6}, SECOND: {"local-ipv4s": "10.0.32.5", **VPC}})
    assert {(str(fact.network), fact.kind, fact.words) for fact in known.facts} == {
        ("10.0.32.0/20", "subnet", "found in AWS metadata (subnet-ipv4-cidr-block)"),
        ("2600:1f14:a:b::/64", "subnet", "found in AWS metadata (subnet-ipv6-cidr-blocks)"),
        ("10.0.0.0/16", "VPC", "found in AWS metadata (vpc-ipv4-cidr-blocks)"),
        ("100.64.0.0/16", "VPC", "found in AWS metadata (vpc-ipv4-cidr-blocks)"),
        ("2600:1f14:a::/56", "VPC", "found in AWS metadata (vpc-ipv6-cidr-blocks)"),
    }
    assert len(known.facts) == 5
    assert known.pause >= POLL == 60.0


def test_nothing_is_asked_for_in_vain() -> None:
    """Of each interface only what its list names is asked for, and one token serves all of it."""
    service = Ec2({FIRST: {"local-ipv4s": "10.0.32.4\n10.0.32.5", **OTHERS}})
    with serving(service) as server:
        client = MetadataClient([server.url], PATIENCE)
        cloud = Aws()
        assert cloud.ask(client) != Known()
        cloud.ask(client)
        client.close()
    paths = [asked.path.removeprefix(MACS) for asked in server.asked]
    once = ["", f"{FIRST}/", f"{FIRST}/local-ipv4s"]
    assert paths == ["/latest/api/token", *once, *once]


def test_an_expired_token_is_replaced() -> None:
    """A 401 leads to a new token and the same question again, in the middle of an answer as well."""
    service = Ec2({FIRST: {"local-ipv4s": "10.0.32.4\n10.0.32.5", **VPC}}, uses=2)
    with serving(service) as server:
        client = MetadataClient([server.url], PATIENCE)
        known = Aws().ask(client)
        client.close()
    assert [str(network) for network in known.ranges] == ["10.0.32.5/32"]
    assert sum(asked.method == "PUT" for asked in server.asked) == 3


def test_tokens_that_never_work() -> None:
    """A service that takes no token is given up after the second one."""
    with serving(Ec2({}, uses=0)) as server:
        client = MetadataClient([server.url], PATIENCE)
        with pytest.raises(UnansweredError, match="401"):
            Aws().ask(client)
        client.close()
    assert [asked.method for asked in server.asked] == ["PUT", "GET", "PUT", "GET"]


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_service_that_gives_no_token(status: int) -> None:
    """Switched off (403), limited or broken, the service is asked for nothing but a token."""
    with serving(lambda _: Reply(status=status)) as server:
        client = MetadataClient([server.url], PATIENCE)
        with pytest.raises(UnansweredError, match=str(status)):
            Aws().ask(client)
        client.close()
    assert [asked.path for asked in server.asked] == ["/latest/api/token"]


def test_an_interface_that_goes_meanwhile_is_left_out() -> None:
    """An interface that was listed and is not there any more (404) has no addresses."""
    service = Ec2({FIRST: {"local-ipv4s": "10.0.32.4\n10.0.32.5"}, SECOND: {"local-ipv4s": "10.0.48.4\n10.0.48.5"}})

    def answer(asked: Asked) -> Reply:
        return Reply(status=404) if SECOND in asked.path else service(asked)

    with serving(answer) as server:
        client = MetadataClient([server.url], PATIENCE)
        assert [str(network) for network in Aws().ask(client).ranges] == ["10.0.32.5/32"]
        client.close()


@pytest.mark.parametrize(
    "interfaces",
    [{"<html>": {}}, {FIRST: {"local-ipv4s": "10.0.32.4\n10.0.32.x"}}, {FIRST: {"ipv4-prefix": "10.0.33.0/99"}}],
)
def test_garbage_is_no_answer(interfaces: Mapping[str, Mapping[str, str]]) -> None:
    """What is neither a MAC address nor an IP address where one belongs makes the whole answer none."""
    with pytest.raises(UnansweredError, match="in place of"):
        ask(interfaces)


@pytest.mark.parametrize("body", ["", " \n"])
@pytest.mark.parametrize("status", [200, 404])
def test_a_service_that_names_no_interface(status: int, body: str) -> None:
    """An instance has interfaces: that there are none is no answer, and takes nothing back."""
    with serving(lambda asked: Reply("token") if asked.method == "PUT" else Reply(body, status)) as server:
        client = MetadataClient([server.url], PATIENCE)
        with pytest.raises(UnansweredError, match="names no interface"):
            Aws().ask(client)
        client.close()


@pytest.mark.parametrize("token", ["a\r\nHost: b", "", "\N{EURO SIGN}", "x" * 100_000])
def test_a_token_that_cannot_be_a_header(token: str) -> None:
    """A token with a line break, which would forge a header, or another that is none, is never sent or shown."""
    with serving(lambda _: Reply(token)) as server:
        client = MetadataClient([server.url], PATIENCE)
        with pytest.raises(UnansweredError, match=r"^the answer is no token$"):
            Aws().ask(client)
        client.close()
    assert [asked.method for asked in server.asked] == ["PUT"]


def test_the_second_endpoint() -> None:
    """Where the first endpoint is not there (an instance with IPv6 only), the second question goes to the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with serving(Ec2({FIRST: {"ipv6-prefix": "2600:1f14:a:b:c::/80"}})) as server:
        client, cloud = MetadataClient([dead, server.url]), Aws()
        with pytest.raises(UnansweredError, match="refused"):
            cloud.ask(client)
        assert [str(network) for network in cloud.ask(client).ranges] == ["2600:1f14:a:b:c::/80"]
        client.close()
