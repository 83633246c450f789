"""Listen addresses: from text to sockets."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from netacct.errors import ConfigError, NetacctError, PermissionRefusedError

_BACKLOG = 128
_FORM = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^\[\]:]*)):(?P<port>\d{1,5})")


class ListenAddress(NamedTuple):
    """Where to listen. An empty host is every address of the machine, of both families; port 0 is any free port."""

    host: str
    port: int


def parse_address(value: str, file: str = "--web.listen-address", key: str = "") -> ListenAddress:
    """A listen address from `HOST:PORT`, `[IPv6]:PORT` or `:PORT`.

    Args:
        value: the text.
        file: where it stands, for the message.
        key: the dotted key in that file, for the message.

    Raises:
        ConfigError: it has another form, or a port above 65535.
    """
    found = _FORM.fullmatch(value)
    if found is None or int(found["port"]) > 65535:
        raise ConfigError(file, key, f"{value!r} is no listen address", ":PORT, HOST:PORT or [IPv6]:PORT")
    return ListenAddress(found["six"] or found["host"], int(found["port"]))


def open_listeners(addresses: Sequence[ListenAddress]) -> list[socket.socket]:
    """A listening socket for each address; none stays open when one fails.

    Raises:
        PermissionRefusedError: a port below 1024 without the right to it.
        NetacctError: a port that is taken, or an address that this machine does not have; names it.
    """
    opened: list[socket.socket] = []
    try:
        for address in addresses:
            opened.append(_open(address))  # noqa: PERF401 - what is open already must be closed when the next one fails
    except NetacctError:
        for listener in opened:
            listener.close()
        raise
    return opened


def _open(address: ListenAddress) -> socket.socket:
    try:
        if address.host:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            return _listen(found[0], found[4], dual=False)
        return _listen_everywhere(address.port)
    except OSError as error:  # gaierror is one too
        kind = PermissionRefusedError if isinstance(error, PermissionError) else NetacctError
        raise kind(f"cannot listen on {_name(address)}: {error.strerror or error}") from error


def _listen_everywhere(port: int) -> socket.socket:
    try:
        return _listen(socket.AF_INET6, ("::", port), dual=True)
    except OSError as error:
        # A kernel without IPv6 refuses the family, one with disable_ipv6 the address.
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _listen(socket.AF_INET, ("0.0.0.0", port), dual=False)  # noqa: S104 - `:PORT` asks for every address


def _listen(family: int, where: tuple[object, ...], *, dual: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not dual))
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _name(address: ListenAddress) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
