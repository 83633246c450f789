"""The netlink socket, against the kernel."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

import pytest
from support import Netns, sh

from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel.netlink import NLM_F_DUMP_INTR, Netlink, NetlinkError, attribute, attributes, find_attribute, nested

LIST = 6 << 8 | 7
VERSION = attribute(1, b"\x06")


@pytest.fixture
def pair() -> Iterator[tuple[Netlink, socket.socket]]:
    """A Netlink that talks to the test instead of the kernel: only so can the kernel's rarer answers be had."""
    netlink = Netlink(timeout=0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    netlink._socket.close()
    ours.settimeout(0.05)
    netlink._socket = ours
    yield netlink, theirs
    netlink.close()
    theirs.close()


def message(kind: int, sequence: int, body: bytes, flags: int = 0) -> bytes:
    """One netlink message."""
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def test_attributes_survive_encoding() -> None:
    """Types lose their flag bits, values keep their length in spite of padding, and nesting nests."""
    data = nested(7, attribute(1, b"abc"), attribute(2 | 0x4000, b"12345678")) + attribute(3, b"")
    (outer, inner), (empty, nothing) = attributes(memoryview(data))

    assert (outer, empty, bytes(nothing)) == (7, 3, b"")
    assert [(kind, bytes(value)) for kind, value in attributes(inner)] == [(1, b"abc"), (2, b"12345678")]


def test_a_kernel_without_nfnetlink_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no such protocol, the error says which, and is one that `datapath: auto` understands."""
    monkeypatch.setattr("netacct.kernel.netlink._NETLINK_NETFILTER", 31)  # a protocol that no kernel has
    with pytest.raises(MissingFeatureError, match=r"no netfilter netlink \(nfnetlink\): Protocol not supported"):
        Netlink()


def test_garbage_ends_the_attributes() -> None:
    """An attribute shorter than its own header ends the run instead of looping for ever."""
    assert list(attributes(memoryview(b"\x00\x00\x01\x00" * 3))) == []


def test_an_attribute_is_found_by_its_type() -> None:
    """The first attribute of a type is found behind others, padded and flagged ones too; a missing one is None."""
    data = memoryview(attribute(1, b"abc") + nested(7, attribute(2, b"xy")) + attribute(7, b"later"))

    assert bytes(find_attribute(data, 7) or b"") == attribute(2, b"xy")
    assert find_attribute(data, 3) is None
    assert find_attribute(memoryview(b"\x00\x00\x01\x00" * 3), 3) is None


@pytest.mark.kernel
def test_the_kernels_error_is_raised(netns: Netns) -> None:
    """An unknown set is ENOENT, and the socket works for the next request."""
    with netns.run(Netlink) as netlink:
        with pytest.raises(NetlinkError) as caught:
            netlink.dump(LIST, 0, VERSION + attribute(2, b"nothing\0"))
        sh("ipset create s hash:ip")
        found = netlink.dump(LIST, 0, VERSION + attribute(2, b"s\0"))

    assert caught.value.code == errno.ENOENT
    assert len(found) == 1


def test_an_interrupted_dump_is_asked_anew(pair: tuple[Netlink, socket.socket]) -> None:
    """A dump that the kernel marks as inconsistent is read to its end, thrown away and repeated."""
    netlink, kernel = pair
    kernel.send(message(LIST, 1, b"\0\0\0\0old!", NLM_F_DUMP_INTR) + message(3, 1, bytes(4)))
    kernel.send(message(LIST, 2, b"\0\0\0\0new!"))
    kernel.send(message(3, 2, bytes(4)))

    assert [bytes(found) for found in netlink.dump(LIST, 0, VERSION)] == [b"new!"]


def test_interruptions_without_end_are_an_error(pair: tuple[Netlink, socket.socket]) -> None:
    """After five interrupted dumps in a row the reader gives up."""
    netlink, kernel = pair
    for sequence in range(1, 6):
        kernel.send(message(3, sequence, bytes(4), NLM_F_DUMP_INTR))
    with pytest.raises(DatapathError, match="interrupted 5 times"):
        netlink.dump(LIST, 0, VERSION)


def test_answers_to_older_requests_are_skipped(pair: tuple[Netlink, socket.socket]) -> None:
    """What still comes in for a request that was given up is not taken for the answer to the next."""
    netlink, kernel = pair
    with pytest.raises(DatapathError, match="did not answer in time"):
        netlink.request(LIST, 0, 0, VERSION)
    kernel.send(message(2, 1, struct.pack("=i", -errno.EPERM)))
    kernel.send(message(2, 2, struct.pack("=i", 0)))

    netlink.request(LIST, 0, 0, VERSION)


def test_a_dump_may_fail_at_its_end(pair: tuple[Netlink, socket.socket]) -> None:
    """An error in the closing message of a dump is raised; ipset's own errors are known by number."""
    netlink, kernel = pair
    kernel.send(message(3, 1, struct.pack("=i", -4097)))
    with pytest.raises(NetlinkError, match="netlink error 4097"):
        netlink.dump(LIST, 0, VERSION)
