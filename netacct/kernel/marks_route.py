"""Who uses marks outside of netfilter: policy routing rules that select by them, tc actions that change them.

Raw rtnetlink dumps, two messages long. tc actions are dumped by their kind, which finds those of every filter on every
interface at once. Numbers: linux/fib_rules.h, linux/rtnetlink.h, linux/pkt_cls.h, linux/tc_act/tc_skbedit.h.
"""

from __future__ import annotations

import errno
import socket
import struct

from netacct import rtnetlink
from netacct.errors import DatapathError
from netacct.kernel.mark_bits import ALL_BITS, Writer
from netacct.kernel.netlink import attribute, attributes, nested

_NUMBER = struct.Struct("=I")
_GET_RULE, _GET_ACTION = 34, 50
_RULE_HEADER = 12  # struct fib_rule_hdr
_RULE_PRIORITY, _RULE_MARK, _RULE_MASK = 6, 10, 16
_ACTION_HEADER = 4  # struct tcamsg
_ACTION_TABLE, _ACTION_KIND, _ACTION_OPTIONS = 1, 1, 2
_PARAMETERS = 2  # TCA_SKBEDIT_PARMS, the same in other actions; begins with the action's index
_SKBEDIT_MARK, _SKBEDIT_MASK = 5, 8
_WHOLE_MARK = ("connmark", "ctinfo")
"""Actions that copy the connection's mark into the packet's."""

_PATIENCE = 5.0


def rules() -> list[Writer]:
    """The policy routing rules of both families that look at marks, with the bits that they compare.

    Raises:
        DatapathError: the kernel did not list them.
    """
    found = []
    for family, tool in ((socket.AF_INET, "ip rule"), (socket.AF_INET6, "ip -6 rule")):
        for message in dump(_GET_RULE, struct.pack("=B11x", family)):
            parts = _numbers(message[_RULE_HEADER:])
            if _RULE_MARK in parts or _RULE_MASK in parts:
                mark, mask = parts.get(_RULE_MARK, 0), parts.get(_RULE_MASK, ALL_BITS)
                where = f"{tool} priority {parts.get(_RULE_PRIORITY, 0)} fwmark {mark:#x}/{mask:#x}"
                found.append(Writer(where, mask))
    return found


def actions() -> list[Writer]:
    """The tc actions that change marks, with the bits that they may change.

    Raises:
        DatapathError: the kernel did not list them.
    """
    return [writer for kind in ("skbedit", *_WHOLE_MARK) for writer in actions_of(kind)]


def actions_of(kind: str) -> list[Writer]:
    """All tc actions of one kind, also of one that changes no mark (with no bits)."""
    request = nested(_ACTION_TABLE, nested(1, attribute(_ACTION_KIND, kind.encode() + b"\0")))
    found = []
    for message in dump(_GET_ACTION, bytes(_ACTION_HEADER) + request):
        for number, table in attributes(memoryview(message)[_ACTION_HEADER:]):
            if number == _ACTION_TABLE:
                found += [action_writer(dict(attributes(action))) for _, action in attributes(table)]
    return found


def action_writer(parts: dict[int, memoryview]) -> Writer:
    """One action, from its attributes."""
    kind = bytes(parts[_ACTION_KIND]).rstrip(b"\0").decode("ascii", "replace")
    options = dict(attributes(parts[_ACTION_OPTIONS])) if _ACTION_OPTIONS in parts else {}
    index = f" index {_NUMBER.unpack_from(options[_PARAMETERS])[0]}" if _PARAMETERS in options else ""
    bits = ALL_BITS if kind in _WHOLE_MARK else 0
    if kind == "skbedit" and _SKBEDIT_MARK in options:
        bits = _NUMBER.unpack(options[_SKBEDIT_MASK])[0] if _SKBEDIT_MASK in options else ALL_BITS
    return Writer(f"tc action {kind}{index}", bits)


def _numbers(data: bytes) -> dict[int, int]:
    """The attributes that are 32-bit numbers in host byte order."""
    found = attributes(memoryview(data))
    return {kind: _NUMBER.unpack(value)[0] for kind, value in found if len(value) == _NUMBER.size}


def dump(kind: int, body: bytes, protocol: int = socket.NETLINK_ROUTE) -> list[bytes]:
    """The bodies of the messages that answer a dump request to rtnetlink, or to another protocol of netlink.

    Asked anew where they changed meanwhile; none where this kernel has no such thing.

    Raises:
        DatapathError: the kernel refused, or did not answer in time.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as link:
        link.settimeout(_PATIENCE)
        link.bind((0, 0))
        try:
            return [message.body for message in rtnetlink.dump_whole(link, kind, body)]
        except TimeoutError as error:
            raise DatapathError("netlink: the kernel did not answer in time") from error
        except OSError as error:
            if error.errno in (0, errno.EOPNOTSUPP, errno.ENOENT):
                return []
            raise DatapathError(f"rtnetlink: {error.strerror}") from error
