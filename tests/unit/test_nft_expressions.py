"""The expressions of rules: only such as the kernel runs fast, and compared by what they do."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from netacct.kernel import nft_parts as parts
from netacct.kernel.netlink import attribute, attributes, nested
from netacct.kernel.nft_expressions import encode, same
from netacct.kernel.nft_messages import LIST_ELEMENT, counter
from netacct.model import Family, Network

PAYLOAD_LENGTH, BITWISE_LENGTH, COMPARED = 4, 3, 3


def _decoded(expression: bytes) -> tuple[str, dict[int, bytes]]:
    name, data = (value for _, value in attributes(memoryview(expression)))
    return bytes(name).rstrip(b"\0").decode(), {kind: bytes(value) for kind, value in attributes(data)}


def _kernels(expressions: list[bytes]) -> memoryview:
    """Expressions as the kernel gives them back."""
    return memoryview(b"".join(attribute(LIST_ELEMENT, one) for one in expressions))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Any network of either family."""
    bits = draw(st.sampled_from((32, 128)))
    kind = ipaddress.IPv4Network if bits == 32 else ipaddress.IPv6Network
    length = draw(st.integers(0, bits))
    number = draw(st.integers(0, (1 << bits) - 1))
    return kind((number >> bits - length << bits - length, length))


@given(networks(), st.sampled_from(("src", "dst")))
def test_prefixes_are_compared_in_what_the_kernel_is_fast_at(network: Network, side: parts.Side) -> None:
    """No prefix of any length makes a load, mask or comparison of other than one, two or four bytes (a /24 did)."""
    encoded = encode((parts.Prefix(side, network),), 4 if network.version == 4 else 6, {})
    for name, data in map(_decoded, encoded):
        match name:
            case "payload":
                assert int.from_bytes(data[PAYLOAD_LENGTH], "big") in (1, 2, 4)
            case "bitwise":
                assert int.from_bytes(data[BITWISE_LENGTH], "big") == 4
            case "cmp":
                (value,) = (value for _, value in attributes(memoryview(data[COMPARED])))
                assert len(value) in (1, 2, 4)
            case _:
                raise AssertionError(name)


@given(networks(), networks())
def test_rules_are_the_same_where_they_do_the_same(one: Network, other: Network) -> None:
    """A rule that the kernel gives back is recognised, and one for another prefix is not."""
    family: Family = 4 if one.version == 4 else 6
    rule = encode((parts.Prefix("src", one), parts.Goto("tx")), family, {})
    found = encode((parts.Prefix("src", other), parts.Goto("tx")), 4 if other.version == 4 else 6, {})
    assert same(rule, _kernels(rule))
    assert same(rule, _kernels(found)) == (one == other or (one.prefixlen == other.prefixlen == 0))


def test_attributes_that_a_newer_kernel_adds_make_no_difference() -> None:
    """A rule with an attribute of which we know nothing is ours; one with another verdict or chain is not."""
    rule = encode((parts.Goto("tx-pod"),), 4, {})
    newer = [attribute(1, b"immediate\0") + nested(2, _data(rule[0]), attribute(99, b"new!"))]
    others = [encode((part,), 4, {}) for part in (parts.Goto("tx-node"), parts.Jump("tx-pod"), parts.Return())]

    assert same(rule, _kernels(newer))
    assert not any(same(rule, _kernels(other)) for other in others)
    assert not same(rule, _kernels([*rule, counter()]))


def _data(expression: bytes) -> bytes:
    return bytes(list(attributes(memoryview(expression)))[1][1])
