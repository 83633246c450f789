"""Drives the conversations over real sockets, and counts at them what was sent and what arrived."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

from netacct.demo.flows import Burst, Datagrams, Echo, Refused, Stream
from netacct.demo.netns import DemoError, Namespace
from netacct.demo.peers import Count
from netacct.demo.world import ADDRESSES, Family, actor_of

_PATIENCE = 20.0  # seconds until a datagram that did not come is taken as lost
_HEADERS = {4: 20 + 8, 6: 40 + 8}  # IP and UDP


class Tally(NamedTuple):
    """What the sockets of one exchange saw, headers included."""

    client_sent: Count
    server_received: Count
    server_sent: Count
    client_received: Count


class Driver:
    """Makes traffic of one family between the namespaces of a topology."""

    def __init__(self, spaces: Mapping[str, Namespace], family: Family) -> None:
        self._spaces = spaces
        self._family = family
        self._domain = socket.AF_INET if family == 4 else socket.AF_INET6

    def exchange(self, flow: Datagrams) -> Tally:
        """Requests one way, replies the other. A datagram that is lost shows as a difference between both ends."""
        with (
            self._socket(flow.client, socket.SOCK_DGRAM) as client,
            self._socket(flow.server, socket.SOCK_DGRAM) as server,
        ):
            client.bind((self._address(flow.client), 0))
            server.bind((self._address(flow.server), flow.port))
            sent = self._send(client, flow.requests, (self._address(flow.to), flow.port))
            arrived, sender = self._receive(server, flow.requests.number)
            if sender is None:
                raise DemoError(f"IPv{self._family}: nothing of {flow.client} to {flow.to} arrived at {flow.server}")
            answered = self._send(server, flow.replies, sender)
            returned, _ = self._receive(client, flow.replies.number)
        return Tally(sent, arrived, answered, returned)

    def stream(self, flow: Stream) -> None:
        """One TCP connection, opened, used and closed in order."""
        with ExitStack() as stack:
            server = stack.enter_context(self._socket(flow.server, socket.SOCK_STREAM))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((self._address(flow.server), flow.port))
            server.listen(1)
            client = stack.enter_context(self._socket(flow.client, socket.SOCK_STREAM))
            client.bind((self._address(flow.client), 0))
            client.connect((self._address(flow.to), flow.port))
            connection, _ = server.accept()
            stack.enter_context(connection)
            connection.settimeout(_PATIENCE)
            self._pump(client, connection, flow)

    def echo(self, flow: Echo) -> None:
        """ICMP echo over a raw socket; waits for every answer. Message formats: RFC 792, RFC 4443."""
        kind, answer, protocol = (8, 0, socket.IPPROTO_ICMP) if self._family == 4 else (128, 129, socket.IPPROTO_ICMPV6)
        with self._socket(flow.client, socket.SOCK_RAW, protocol) as client:
            client.bind((self._address(flow.client), 0))
            payload = bytes(flow.requests.size)
            for number in range(flow.requests.number):
                head = struct.pack("!BBHHH", kind, 0, 0, 0x4E41, number)
                message = head[:2] + struct.pack("!H", _checksum(head + payload)) + head[4:] + payload
                client.sendto(message, (self._address(flow.to), 0))
                self._await_answer(client, answer, number, flow)

    def knock(self, flow: Refused) -> None:
        """Datagrams to a closed port, each of which comes back as an error."""
        with self._socket(flow.client, socket.SOCK_DGRAM) as client:
            client.bind((self._address(flow.client), 0))
            client.connect((self._address(flow.to), flow.port))
            for _ in range(flow.requests.number):
                try:
                    client.send(bytes(flow.requests.size))
                    client.recv(1)
                except ConnectionRefusedError:
                    continue
                except TimeoutError as error:
                    raise DemoError(f"IPv{self._family}: no ICMP error of {flow.to} reached {flow.client}") from error

    def _socket(self, place: str, kind: int, protocol: int = 0) -> socket.socket:
        made = self._spaces[actor_of(place)].socket(self._domain, kind, protocol)
        made.settimeout(_PATIENCE)
        return made

    def _address(self, place: str) -> str:
        return ADDRESSES[self._family][place]

    def _send(self, end: socket.socket, burst: Burst, to: tuple[str, int]) -> Count:
        for _ in range(burst.number):
            end.sendto(bytes(burst.size), to)
        return Count(burst.number * (burst.size + _HEADERS[self._family]), burst.number)

    def _receive(self, end: socket.socket, count: int) -> tuple[Count, tuple[str, int] | None]:
        total, sender = Count(0, 0), None
        for _ in range(count):
            try:
                data, sender = end.recvfrom(65535)
            except TimeoutError:
                break
            total = total.plus(Count(len(data) + _HEADERS[self._family], 1))
        return total, sender

    def _pump(self, client: socket.socket, server: socket.socket, flow: Stream) -> None:
        """Send on a thread, receive here: neither end may wait for the other."""
        sender = threading.Thread(target=_send_all, args=(client, flow.size), daemon=True)
        sender.start()
        got = 0
        while chunk := server.recv(65536):
            got += len(chunk)
        sender.join(_PATIENCE)
        if got != flow.size:
            raise DemoError(f"IPv{self._family}: TCP {flow.client} to {flow.to}: {got} of {flow.size} bytes arrived")

    def _await_answer(self, client: socket.socket, answer: int, number: int, flow: Echo) -> None:
        """Wait for the echo reply; a raw socket also hears other messages. An IPv4 one gets the IP header with it."""
        for _ in range(64):
            try:
                data = client.recv(65535)
            except TimeoutError:
                break
            message = data[(data[0] & 15) * 4 :] if self._family == 4 else data
            if message[0] == answer and message[4:8] == struct.pack("!HH", 0x4E41, number):
                return
        raise DemoError(f"IPv{self._family}: no echo reply of {flow.to} reached {flow.client}")


def _send_all(client: socket.socket, size: int) -> None:
    client.sendall(bytes(size))
    client.shutdown(socket.SHUT_WR)


def _checksum(message: bytes) -> int:
    """The Internet checksum (RFC 1071). For ICMPv6 the kernel writes its own over it."""
    padded = message + bytes(len(message) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
