"""Which address families this kernel has at all."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from netacct.model import Family

_ADDRESSES = Path("/proc/thread-self/net/if_inet6")
"""Is there, also where it is empty, wherever IPv6 is (net/ipv6/addrconf.c)."""


def present() -> tuple[Family, ...]:
    """The families of which packets can exist: without IPv6 (`ipv6.disable=1`, or not built) IPv4 alone.

    Where it is only switched off on interfaces (`disable_ipv6`), or denied to this process, it is there.
    """
    if _ADDRESSES.exists():
        return (4, 6)
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()  # loads the module, if it is one
    except OSError as error:
        return (4,) if error.errno == errno.EAFNOSUPPORT else (4, 6)
    return (4, 6)
