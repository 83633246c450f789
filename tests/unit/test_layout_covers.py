"""Prefixes that stand before a set, rounded prefix lengths, and how large a set is made."""

from __future__ import annotations

import bisect
import ipaddress
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.kernel.classify import MAX_COVERS, blocks, covers, rounded
from netacct.kernel.layout import SetSpec, hash_size


def _cidrs(seed: int, count: int, bits: int) -> list[ipaddress.IPv4Network]:
    rng = random.Random(seed)
    found = (ipaddress.IPv4Network((rng.getrandbits(32), rng.randint(bits, 32)), strict=False) for _ in range(count))
    return list(ipaddress.collapse_addresses(found))


@settings(deadline=None)  # two cores, many tenants
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), bits=st.sampled_from([3, 12, 20]))
def test_covers_contain_everything_and_do_not_overlap(seed: int, count: int, bits: int) -> None:
    """Covers are few, disjoint, and each network lies in exactly one of them."""
    networks = _cidrs(seed, count, bits)
    found = covers(networks)
    if found == (None,):
        return
    assert len(found) <= MAX_COVERS
    assert not any(a is None or b is None or a.overlaps(b) for a, b in itertools.combinations(found, 2))
    for network in networks:
        assert sum(isinstance(cover, ipaddress.IPv4Network) and network.subnet_of(cover) for cover in found) == 1


def test_covers_of_clustered_networks_are_tight() -> None:
    """Service addresses of one range and a few nodes are covered by their own short ranges."""
    services = [ipaddress.ip_network(f"10.96.{third}.1") for third in range(20)]
    nodes = [ipaddress.ip_network("192.168.50.1"), ipaddress.ip_network("172.16.4.1")]
    assert [str(cover) for cover in covers([*services, *nodes])] == [
        "10.96.0.0/20", "10.96.16.0/22", "172.16.4.1/32", "192.168.50.1/32",
    ]  # fmt: skip


def test_covers_of_scattered_networks_are_none() -> None:
    """Networks all over the address space have no cover worth a rule."""
    assert covers([ipaddress.ip_network(f"{first}.1.2.0/24") for first in range(1, 224)]) == (None,)


@settings(deadline=None)  # two cores, many tenants
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), bits=st.sampled_from([3, 12, 20]))
def test_blocks_are_the_16s_that_are_touched(seed: int, count: int, bits: int) -> None:
    """Blocks are exactly the /16s in which some address of a network lies, or none where they are a quarter of all."""
    networks = _cidrs(seed, count, bits)
    everything = ipaddress.ip_network("0.0.0.0/0").subnets(new_prefix=16)
    firsts = [int(network.network_address) for network in networks]
    touched = []
    for block in everything:
        at = bisect.bisect_right(firsts, int(block.broadcast_address)) - 1
        if at >= 0 and networks[at].overlaps(block):
            touched.append(block)
    assert list(blocks(networks)) == (touched if len(touched) <= 1 << 14 else [])


def test_there_are_no_blocks_of_ipv6() -> None:
    """A bitmap holds IPv4 addresses only."""
    assert blocks([ipaddress.ip_network("2001:db8::/48")]) == ()


@settings(deadline=None)  # two cores, many tenants
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_rounding_keeps_the_addresses(seed: int, count: int) -> None:
    """Rounded networks are the same addresses in no more prefix lengths, and never a /0, which hash:net lacks."""
    networks = _cidrs(seed, count, 0)
    finer = rounded(networks)
    assert all(net.prefixlen for net in finer)
    assert list(ipaddress.collapse_addresses(finer)) == networks  # type: ignore[type-var]  # all of one family
    assert len({net.prefixlen for net in finer}) <= max(1, len({net.prefixlen for net in networks}))


def test_rounding_long_ipv6_prefixes_does_not_explode() -> None:
    """Prefixes longer than /64 keep their lengths: between them lie too many addresses to split."""
    texts = ["2001:db8::/33", "2001:db9::/35", "2001:dba::/47", "2001:db8:ffff::/65", "2001:db8:ffff:1::1/128"]
    networks = [ipaddress.ip_network(text) for text in texts]
    assert sorted({network.prefixlen for network in rounded(networks)}) == [36, 48, 65, 128]


@pytest.mark.parametrize(("size", "expected"), [(1, 64), (64, 64), (65, 128), (4097, 8192), (16384, 16384)])
def test_hash_tables_have_a_bucket_for_each_element(size: int, expected: int) -> None:
    """A set's hash size is the power of two that holds its elements, so that it never grows."""
    assert hash_size(SetSpec("nacc4-tx-pod", "hash:ip", 4, size=size)) == expected
