"""Local ranges joined with the addresses that sources name."""

from __future__ import annotations

import ipaddress

from netacct.identity.ranges import join
from netacct.model import pack


def nets(*texts: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Networks from text."""
    return tuple(map(ipaddress.ip_network, texts))


def test_an_address_inside_a_range_adds_nothing() -> None:
    """Addresses that a range covers, at its first, a middle and its last address, leave the ranges as they are."""
    ranges = nets("10.244.1.0/24", "fd00::/64")
    inside = map(pack, ("10.244.1.0", "10.244.1.9", "10.244.1.255", "fd00::", "fd00::ffff:ffff:ffff:ffff"))
    assert join(ranges, inside) == ranges


def test_an_address_outside_joins_alone() -> None:
    """An address outside of all ranges joins as /32 or /128, in sorted order and once."""
    outside = [pack(text) for text in ("10.244.2.0", "9.0.0.1", "fd00:0:0:1::", "9.0.0.1")]
    assert join(nets("10.244.1.0/24", "fd00::/64"), outside) == nets(
        "9.0.0.1/32", "10.244.1.0/24", "10.244.2.0/32", "fd00::/64", "fd00:0:0:1::/128"
    )


def test_families_do_not_cover_each_other() -> None:
    """An IPv6 range that begins with the bits of an IPv4 address does not cover that address."""
    assert join(nets("a00::/8"), [pack("10.0.0.1")]) == nets("10.0.0.1/32", "a00::/8")
