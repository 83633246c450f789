"""Listen addresses, from text to sockets."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from netacct.errors import ConfigError, NetacctError
from netacct.export.endpoints import page
from netacct.export.listen import ListenAddress, open_listeners, parse_address
from netacct.export.server import Server


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (":19112", ("", 19112)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:19112", ("::1", 19112)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("localhost:80", ("localhost", 80)),
    ],
)
def test_addresses_are_read(value: str, address: tuple[str, int]) -> None:
    """A port alone, a host and a bracketed IPv6 address are understood."""
    assert parse_address(value) == address


@pytest.mark.parametrize("value", ["", "19112", ":", ":x", "::1:80", "[::1]", "[]:80", ":65536", "a:b:1", "http://x:1"])
def test_a_bad_address_names_itself_and_where_it_stands(value: str) -> None:
    """What is no listen address is a ConfigError with file, key, the text and what is allowed."""
    with pytest.raises(ConfigError) as error:
        parse_address(value, "netacct.yaml", "web.listen_address[0]")
    assert repr(value) in str(error.value)
    assert "netacct.yaml: web.listen_address[0]" in str(error.value)
    assert error.value.exit_code == 78


def test_a_taken_port_is_named_and_nothing_stays_open() -> None:
    """The error names the address, and the addresses that could be had are given back."""
    [first] = open_listeners([ListenAddress("127.0.0.1", 0)])
    with first:
        port = first.getsockname()[1]
        [free] = open_listeners([ListenAddress("127.0.0.1", 0)])
        spare = free.getsockname()[1]
        free.close()
        with pytest.raises(NetacctError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            open_listeners([ListenAddress("127.0.0.1", spare), ListenAddress("127.0.0.1", port)])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", spare), timeout=1)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_somebody_else_is_named(host: str) -> None:
    """Neither an address that this machine lacks nor a name that nobody knows ends in a traceback."""
    with pytest.raises(NetacctError, match=f"cannot listen on {host}:80: "):
        open_listeners([ListenAddress(host, 80)])


def test_several_addresses_are_served() -> None:
    """One server answers on IPv4 and on IPv6."""
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    server = Server([ListenAddress("127.0.0.1", 0), ListenAddress("::1", 0)], {"/": page("hello")})
    server.start()
    try:
        for address in server.addresses:
            with socket.create_connection(address, timeout=60) as client:
                client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
    finally:
        server.stop()


EVERYWHERE = """
import socket, subprocess
from netacct.export.endpoints import page
from netacct.export.listen import ListenAddress, open_listeners, parse_address
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
if {without_ipv6}:
    real = socket.socket.bind
    def bind(sock, where):
        if sock.family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        real(sock, where)
    socket.socket.bind = bind
[listener] = open_listeners([parse_address(":19112")])
for host in {hosts}:
    socket.create_connection((host, 19112), timeout=60).close()
both = open_listeners([parse_address("0.0.0.0:19113"), parse_address("[::]:19113")]) if not {without_ipv6} else []
print(listener.family.name)
"""


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("without_ipv6", "hosts", "family"),
    [(False, ["127.0.0.1", "::1"], "AF_INET6"), (True, ["127.0.0.1"], "AF_INET")],
)
def test_a_port_alone_is_every_address_of_both_families(*, without_ipv6: bool, hosts: list[str], family: str) -> None:
    """`:PORT` answers to IPv4 and IPv6, and to IPv4 where the kernel has no IPv6 (refused by hand: it takes a boot)."""
    script = EVERYWHERE.format(without_ipv6=without_ipv6, hosts=hosts)
    run = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.stdout, run.returncode) == (f"{family}\n", 0), run.stderr
