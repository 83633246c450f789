"""The set reader and writer, against the ipset program and the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support import Netns, plan, sh

from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel import ipset, layout
from netacct.kernel.ipset import Element, Header, SetFullError, Sets
from netacct.kernel.netlink import Netlink
from netacct.kernel.setmaker import epoch_of, is_ours, key_of
from netacct.model import pack

pytestmark = pytest.mark.kernel


@pytest.fixture
def netlink(netns: Netns) -> Iterator[Netlink]:
    """A netlink socket in the test's namespace."""
    with netns.run(Netlink) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("hash:ip", "10.0.0.1", "10.0.0.2"),
        ("hash:ip family inet6", "fd00::1", "fd00::2"),
        ("bitmap:ip range 0.0.0.0/0 netmask 1", "0.0.0.0", "128.0.0.0"),  # noqa: S104  # nobody binds to it
        ("hash:net", "0.0.0.0/1", "128.0.0.0/1"),
        ("hash:net family inet6", "::/1", "8000::/1"),
        ("hash:ip timeout 1000", "10.0.0.1", "10.0.0.2"),
    ],
)
def test_counters_are_read_as_ipset_wrote_them(netlink: Netlink, kind: str, first: str, second: str) -> None:
    """Addresses, bytes and packets of 64 bits come back for each type of set, also in layouts without a fast way."""
    sh(f"ipset create s {kind} counters")
    sh(f"ipset add s {first} packets 1 bytes 18446744073709551614", f"ipset add s {second} packets 4294967296 bytes 7")

    assert ipset.read_counters(netlink, "s") == {
        pack(first.partition("/")[0]): (18446744073709551614, 1),
        pack(second.partition("/")[0]): (7, 4294967296),
    }


def test_what_is_not_there_is_none_and_what_is_empty_is_empty(netlink: Netlink) -> None:
    """A missing set reads as None, an empty one as no counters."""
    sh("ipset create s hash:ip counters")

    assert ipset.read_counters(netlink, "s") == {}
    assert ipset.read_elements(netlink, "s") == []
    assert ipset.read_counters(netlink, "t") is None
    assert ipset.read_header(netlink, "t") is None
    assert ipset.read_counters(netlink, "s") == {}


def test_thousands_of_elements_are_added_and_read(netlink: Netlink) -> None:
    """Bulk additions take several messages, as do readings, and nothing is lost between them."""
    ips = [pack("10.9.0.0")[:2] + number.to_bytes(2, "big") for number in range(5000)]
    sh("ipset create s hash:ip counters maxelem 5000 hashsize 8192")
    ipset.add(netlink, "s", ((ip, None) for ip in ips))
    counts = ipset.read_counters(netlink, "s")

    assert counts == dict.fromkeys(ips, (0, 0))
    assert sh("ipset list -t s").count("Number of entries: 5000") == 1


def test_adding_what_is_there_keeps_its_counters(netlink: Netlink) -> None:
    """An element that is added again keeps its counters, and one that was deleted starts again at zero."""
    sh("ipset create s hash:ip counters", "ipset add s 10.0.0.1 packets 5 bytes 500")
    sh("ipset add s 10.0.0.2 packets 6 bytes 600")
    ipset.discard(netlink, "s", [pack("10.0.0.2"), pack("10.0.0.3")])
    ipset.add(netlink, "s", [(pack("10.0.0.1"), None), (pack("10.0.0.2"), None)])

    assert ipset.read_counters(netlink, "s") == {pack("10.0.0.1"): (500, 5), pack("10.0.0.2"): (0, 0)}


def test_a_new_address_begins_at_zero_in_the_place_of_a_deleted_one(netlink: Netlink) -> None:
    """Addresses that return to a crowded set count from 0, though the kernel would hand them their old counters."""
    sh("ipset create t hash:ip counters hashsize 64 maxelem 400")
    addresses = [pack(f"192.0.2.{number}") for number in range(200)]
    for ip in addresses:
        ipset.add_counted(netlink, "t", ip, 896, 7)
    ipset.discard(netlink, "t", addresses[:150])
    ipset.add_fresh(netlink, "t", addresses)
    expected = dict.fromkeys(addresses[:150], (0, 0)) | dict.fromkeys(addresses[150:], (896, 7))
    assert ipset.read_counters(netlink, "t") == expected


def test_a_counted_element_is_added_once(netlink: Netlink) -> None:
    """An element with given counters is added where it is missing, and left alone where it is not."""
    sh("ipset create s hash:ip counters")

    assert ipset.add_counted(netlink, "s", b"\xff" * 4, octets=2**62, packets=1)
    assert not ipset.add_counted(netlink, "s", b"\xff" * 4, octets=5, packets=5)
    assert ipset.read_counters(netlink, "s") == {b"\xff" * 4: (2**62, 1)}


def test_a_full_set_says_so(netlink: Netlink) -> None:
    """The element that finds no room raises; those before it are in."""
    sh("ipset create s hash:ip counters maxelem 2")
    with pytest.raises(SetFullError, match="add to set s: it is full"):
        ipset.add(netlink, "s", [(pack(f"10.0.0.{number}"), None) for number in range(1, 5)])

    assert len(ipset.read_counters(netlink, "s") or ()) == 2


def test_sets_are_made_as_described(netlink: Netlink) -> None:
    """Hash sets have the size, buckets and counters asked for, bitmaps the range, netmask and counters."""
    ends, pods = (b"\0" * 4, b"\xff" * 4), (pack("10.244.1.0"), pack("10.244.2.0"))
    with closing(Sets(netlink)) as sets:
        sets.create_hash("h", "hash:ip", 6, 300, 512, counters=True)
        sets.create_hash("n", "hash:net", 4, 10, 64, counters=False)
        sets.create_bitmap("b", ends, 1, counters=True)
        sets.create_bitmap("c", pods, 0, counters=True)
        sets.create_bitmap("d", ends, 16, counters=False)

    assert ipset.read_header(netlink, "h") == Header("hash:ip", 6, 512, 300, 0, counters=True, references=0)
    assert ipset.read_header(netlink, "n") == Header("hash:net", 4, 64, 10, 0, counters=False, references=0)
    assert ipset.read_header(netlink, "b") == Header("bitmap:ip", 4, 0, 0, 1, counters=True, references=0, range=ends)
    assert ipset.read_header(netlink, "c") == Header("bitmap:ip", 4, 0, 0, 0, counters=True, references=0, range=pods)
    assert "range 0.0.0.0-255.255.255.255 netmask 1 counters" in sh("ipset list -t b")
    assert "range 10.244.1.0-10.244.2.0 counters" in sh("ipset list -t c")
    assert sh("ipset save d") == "create d bitmap:ip range 0.0.0.0-255.255.255.255 netmask 16\n"


def test_a_bitmap_is_read_with_its_end(netlink: Netlink) -> None:
    """The counters of a bitmap come with the last address of its range, those of a hash with none."""
    sh("ipset create b bitmap:ip range 10.0.0.0-10.0.1.0 counters", "ipset add b 10.0.0.9 packets 2 bytes 200")
    sh("ipset create h hash:ip counters", "ipset add h 10.0.0.9 packets 2 bytes 200")

    assert ipset.read_set(netlink, "b") == ({pack("10.0.0.9"): (200, 2)}, pack("10.0.1.0"))
    assert ipset.read_set(netlink, "h") == ({pack("10.0.0.9"): (200, 2)}, None)
    assert ipset.read_set(netlink, "none") is None


def test_prefixes_are_written_and_read(netlink: Netlink) -> None:
    """The content of a classifying set comes back with its prefix lengths."""
    sh("ipset create n hash:net family inet6")
    ipset.add(netlink, "n", [(pack("fd00::"), 8), (pack("2001:db8::1"), 128)])

    assert sorted(ipset.read_elements(netlink, "n")) == [
        Element(pack("2001:db8::1"), 128, 0, 0),
        Element(pack("fd00::"), 8, 0, 0),
    ]


def test_swap_and_destroy(netlink: Netlink) -> None:
    """Swapping exchanges contents; a set in use is not destroyed, a missing one counts as destroyed."""
    sh("ipset create a hash:ip counters", "ipset create b hash:ip counters", "ipset add a 10.0.0.1")
    sh("iptables-legacy -t mangle -A INPUT -m set --match-set b src")
    with closing(Sets(netlink)) as sets:
        sets.swap("a", "b")
        destroyed = [sets.destroy(name) for name in ("a", "b", "c")]

    assert destroyed == [True, False, True]
    assert ipset.read_counters(netlink, "b") == {pack("10.0.0.1"): (0, 0)}
    assert ipset.read_header(netlink, "b") == Header("hash:ip", 4, 1024, 65536, 0, counters=True, references=1)


def test_names_are_listed_by_prefix(netlink: Netlink) -> None:
    """Only names with the prefix are listed, sorted."""
    sh("ipset create xb hash:ip", "ipset create xa hash:ip", "ipset create y hash:ip")

    assert ipset.set_names(netlink, "x") == ["xa", "xb"]


def test_errors_name_what_was_attempted(netlink: Netlink) -> None:
    """A set that exists, and a type that the kernel does not know, are errors that name set and type."""
    sh("ipset create s hash:ip")
    with closing(Sets(netlink)) as sets:
        with pytest.raises(DatapathError, match="cannot create set s of type hash:ip"):
            sets.create_hash("s", "hash:ip", 4, 10, 64, counters=True)
        with pytest.raises(MissingFeatureError, match="create set t of type hash:nothing: this kernel lacks"):
            sets.create_hash("t", "hash:nothing", 4, 10, 64, counters=True)


def test_bulk_additions_are_whole(netlink: Netlink) -> None:
    """Twelve sets of 4,096 addresses are filled, each with all of them."""
    ips = [number.to_bytes(4, "big") for number in range(1, 4097)]
    for number in range(12):
        sh(f"ipset create s{number} hash:ip counters maxelem 4097 hashsize 8192")
    for number in range(12):
        ipset.add(netlink, f"s{number}", ((ip, None) for ip in ips))

    for number in range(12):
        assert set(ipset.read_counters(netlink, f"s{number}") or ()) == set(ips)


def test_set_names_tell_their_counters() -> None:
    """The key of every counter set, of any class name, can be told from its kernel name, also under a spare name."""
    for one in layout.build(plan(local=("10.244.0.0/16", "fd00:10:244:1::/124"))):
        for spec in one.sets:
            name = f"{spec.name}-00002s" if spec.catch_all else spec.name
            assert is_ours(name)
            assert key_of(name) == spec.key
            assert key_of(name.replace("-", "+", 1)) == spec.key
    assert epoch_of("nacc4-to-a-b-00002s") == 100
    assert not is_ours("nacc4-other")
    assert not is_ours("naccount")
