"""Who changes marks in legacy xtables: a raw read of the tables that exist, which makes none and takes no lock.

The kernel copies a table out on IPT_SO_GET_ENTRIES (linux/netfilter_ipv4/ip_tables.h and its IPv6 twin): entries one
after the other, each with its matches and a target at `target_offset`; a chain of the user's begins with a target named
ERROR that holds its name. Asking for a table that does not exist would make it, so only those are asked for that
/proc/net/ip_tables_names lists. python-iptables makes all tables and decodes rules of others at its own risk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from netacct.errors import DatapathError, PermissionRefusedError
from netacct.kernel import families
from netacct.kernel.layout import CHAIN_PREFIX
from netacct.kernel.mark_bits import Writer, target_bits
from netacct.model import Family

_GET_INFO, _GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same for IPv6
_INFO = struct.Struct("=32sI5I5III")  # name, valid_hooks, hook_entry, underflow, num_entries, size
_ENTRIES_HEADER = 40  # name, size, and padding in front of 64-bit counters
_TARGET = struct.Struct("=H29sB")  # target_size, name, revision
_HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_END = "ERROR"
"""The name of a chain's head, and of the entry that ends a table."""

_TRIES = 5


class Kind(NamedTuple):
    """What differs between the families."""

    version: Family
    tool: str
    names: str
    family: socket.AddressFamily
    level: int
    offsets: int  # of target_offset and next_offset in an entry


KINDS = (
    Kind(4, "iptables", "ip_tables_names", socket.AF_INET, socket.IPPROTO_IP, 88),
    Kind(6, "ip6tables", "ip6_tables_names", socket.AF_INET6, socket.IPPROTO_IPV6, 140),
)


class Target(NamedTuple):
    """The target of one foreign rule."""

    chain: str
    name: str
    revision: int
    info: bytes


def read() -> tuple[list[Writer], set[str]]:
    """Every foreign rule that changes marks, and the names of all foreign chains, in this network namespace.

    Raises:
        DatapathError: a table that exists could not be read.
        PermissionRefusedError: nobody but root may know which exist.
    """
    writers: list[Writer] = []
    chains: set[str] = set()
    for kind in KINDS:
        for table in tables(kind):
            try:
                hooks, blob = entries(kind, table)
            except OSError as error:
                raise DatapathError(f"reading the {kind.tool} table {table}: {error.strerror}") from error
            for target in targets(kind.offsets, hooks, blob):
                if target.chain.startswith(CHAIN_PREFIX):
                    continue
                chains.add(target.chain)
                if bits := target_bits(target.name, target.revision, target.info):
                    writers.append(Writer(f"{kind.tool} table {table} chain {target.chain} target {target.name}", bits))
    return writers, chains - {_END}


def targets(offsets: int, hooks: dict[int, str], blob: bytes) -> Iterator[Target]:
    """Each entry's target, in the order of the table; a chain's own ERROR entry too.

    Args:
        offsets: where target_offset and next_offset are in an entry.
        hooks: the names of built-in chains, by the offset of their first entry.
        blob: the entries.
    """
    at, chain = 0, ""
    while at < len(blob):
        chain = hooks.get(at, chain)
        target_at, length = struct.unpack_from("=HH", blob, at + offsets)
        size, raw, revision = _TARGET.unpack_from(blob, at + target_at)
        name, info = _text(raw), blob[at + target_at + _TARGET.size : at + target_at + size]
        if name == _END:
            chain = _text(info)
        yield Target(chain, name, revision, info)
        at += length


def tables(kind: Kind) -> list[str]:
    """The tables that exist in this network namespace. Raises PermissionRefusedError: capabilities are not enough."""
    if kind.version not in families.present():  # older kernels list tables that no socket reaches
        return []
    path = Path("/proc/thread-self/net") / kind.names  # of the thread's own namespace; /proc/net is the main thread's
    try:
        return path.read_text(encoding="ascii").split()
    except FileNotFoundError:  # a kernel without legacy tables, or none loaded
        return []
    except PermissionError as error:
        raise PermissionRefusedError(f"{path}: only root may read it") from error


def entries(kind: Kind, table: str, limit: int = 1 << 31) -> tuple[dict[int, str], bytes]:
    """The entries of one table, and its hooks by offset. Asked anew while somebody changes its size.

    Raises OSError; EFBIG for a table of more than `limit` bytes, which is not copied.
    """
    with socket.socket(kind.family, socket.SOCK_RAW, socket.IPPROTO_RAW) as handle:
        for _ in range(_TRIES):
            found = _INFO.unpack(_ask(handle, kind.level, _GET_INFO, _INFO.pack(table.encode(), *[0] * 13)))
            valid, begins, size = found[1], found[2:7], found[13]
            if size > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            hooks = {
                begin: name for hook, (name, begin) in enumerate(zip(_HOOKS, begins, strict=True)) if valid >> hook & 1
            }
            request = struct.pack("=32sI4x", table.encode(), size).ljust(_ENTRIES_HEADER + size, b"\0")
            try:
                return hooks, _ask(handle, kind.level, _GET_ENTRIES, request)[_ENTRIES_HEADER:]
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _ask(handle: socket.socket, level: int, option: int, request: bytes) -> bytes:
    """getsockopt(2) with an argument in the buffer, which Python's own cannot pass."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(request, len(request))
    length = ctypes.c_uint(len(request))
    if libc.getsockopt(handle.fileno(), level, option, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("ascii", "replace")
