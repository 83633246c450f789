"""For tests of those who ask by HTTPS: an authority that signs certificates, a server that answers as it is told."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

OPENSSL = shutil.which("openssl")


class Keys(NamedTuple):
    """The files of a certificate and of its key."""

    certificate: str
    key: str


class Authority:
    """Signs certificates, in files of a directory. Needs the program openssl (3.0 or later)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.keys = self._make("authority", "basicConstraints=critical,CA:true")

    def issue(self, name: str, alternative: str = "") -> Keys:
        """A certificate in the name of `name`, for `alternative` ("IP:127.0.0.1"); replaces one of that name."""
        options = ["-CA", self.keys.certificate, "-CAkey", self.keys.key]
        return self._make(name, f"subjectAltName={alternative or 'DNS:' + name}", *options)

    def itself(self, name: str, alternative: str) -> Keys:
        """A certificate that nobody signed but its owner, and that ended yesterday."""
        keys = self._make(name, f"subjectAltName={alternative}", "-addext", "basicConstraints=critical,CA:false")
        assert OPENSSL
        old = ["x509", "-in", keys.certificate, "-signkey", keys.key, "-days", "-1", "-out", keys.certificate + ".old"]
        subprocess.run([OPENSSL, *old], check=True, capture_output=True)
        Path(keys.certificate + ".old").rename(keys.certificate)
        return keys

    def _make(self, name: str, extension: str, *options: str) -> Keys:
        keys = Keys(str(self._directory / f"{name}.crt"), str(self._directory / f"{name}.key"))
        assert OPENSSL
        new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        out = ["-keyout", keys.key, "-out", keys.certificate, "-subj", f"/CN={name}", "-addext", extension]
        subprocess.run([OPENSSL, *new, *out, *options], check=True, capture_output=True)
        return keys


class Request(NamedTuple):
    """What a server was asked. `client` is the name in the client's certificate, "" without one."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    client: str


class Reply:
    """The server's side of one connection, for the function that answers."""

    def __init__(self, connection: socket.socket, closing: threading.Event) -> None:
        self._connection, self._closing = connection, closing

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._connection.sendall(data)

    def whole(self, body: bytes, status: str = "200 OK", **headers: str) -> None:
        """A whole answer."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    def json(self, document: object, status: str = "200 OK", **headers: str) -> None:
        """A whole answer in JSON."""
        self.whole(json.dumps(document).encode(), status, **headers)

    def begin(self) -> None:
        """The head of an answer that comes in chunks."""
        self.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """A chunk of it."""
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self) -> None:
        """The regular end of it."""
        self.raw(b"0\r\n\r\n")

    def gone(self) -> bool:
        """Whether the other side has gone, or the server is closed; waits a moment for it."""
        self._connection.settimeout(0.02)
        try:
            return self._closing.is_set() or not self._connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True

    def hold(self) -> bool:
        """Wait until the other side has gone; False where the server was closed before."""
        while not self.gone():
            pass
        return not self._closing.is_set()


Answering = Callable[[Request, Reply], None]


class Server:
    """Answers on a port of 127.0.0.1, each connection in a thread of its own.

    Args:
        answer: is called for each request.
        keys: the server's certificate; plain HTTP without.
        clients: who must have signed the client's certificate (a file); "" asks for none.
    """

    def __init__(self, answer: Answering, keys: Keys | None = None, clients: str = "") -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self._keys, self._clients = keys, clients
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'https' if self._keys else 'http'}://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End everything."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _run(self) -> None:
        self._listener.settimeout(0.02)
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                plain, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(plain,)))
                self._threads[-1].start()

    def _serve(self, plain: socket.socket) -> None:
        plain.settimeout(60)
        with contextlib.suppress(OSError), plain:
            connection = self._secured(plain)
            client = _name(connection)
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    data = connection.recv(65536)
                    if not data:
                        return
                    head += data
                request = _request(head, client)
                self.requests.append(request)
                self.answer(request, Reply(connection, self._closing))
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_WR)

    def _secured(self, plain: socket.socket) -> socket.socket:
        if self._keys is None:
            return plain
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._keys)
        if self._clients:
            context.load_verify_locations(self._clients)
            context.verify_mode = ssl.CERT_REQUIRED
        return context.wrap_socket(plain, server_side=True)


def kubeconfig(path: Path, server: str, **user: Any) -> str:
    """Writes a kubeconfig; returns its path."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server, **user.pop("cluster", {})}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(document))
    return str(path)


def _name(connection: socket.socket) -> str:
    certificate = connection.getpeercert() if isinstance(connection, ssl.SSLSocket) else None
    subject = dict(pair for parts in (certificate or {}).get("subject", ()) for pair in parts)  # type: ignore[misc]  # typeshed: a value of any kind
    return str(subject.get("commonName", ""))


def _request(head: bytes, client: str) -> Request:
    first, *lines = head.decode().split("\r\n\r\n")[0].split("\r\n")
    target = urlsplit(first.split()[1])
    headers = dict(line.split(": ", 1) for line in lines)
    return Request(target.path, dict(parse_qsl(target.query)), headers, client)
