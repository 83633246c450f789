"""A small HTTP server on 127.0.0.1, for tests of what asks a cloud's metadata server."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PATIENCE = 60.0
"""Seconds for what must come: for a client's deadline, too, where that is not what is tested."""


class Asked(NamedTuple):
    """A request; names of headers are in lower case. `connection` tells connections apart."""

    method: str
    path: str
    headers: Mapping[str, str]
    connection: int = 0


class Reply(NamedTuple):
    """An answer of the documented form."""

    body: str = ""
    status: int = 200
    headers: Mapping[str, str] = {}


Answerer = Callable[[Asked], Reply | bytes]
"""Answers a request; bytes are sent as they are, and the connection is closed then."""


@dataclass
class MetadataServer:
    """Serves what `answer` says; a test may exchange it. `asked` has every request."""

    answer: Answerer
    asked: list[Asked] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def wait_for(self, count: int, seconds: float = PATIENCE) -> None:
        """Wait until so many requests have come."""
        deadline = time.monotonic() + seconds
        while len(self.asked) < count:
            assert time.monotonic() < deadline, f"only {len(self.asked)} of {count} requests came"
            time.sleep(0.005)


@contextlib.contextmanager
def serving(answer: Answerer) -> Iterator[MetadataServer]:
    """A server on a free port, for as long as the context lasts."""
    told = MetadataServer(answer)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one segment: else the second waits 40 ms for a delayed ACK

        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, headers, self.client_address[1])
            told.asked.append(asked)
            reply = told.answer(asked)
            with contextlib.suppress(OSError):  # the client may be gone
                if isinstance(reply, bytes):
                    self.close_connection = True
                    self.wfile.write(reply)
                    return
                body = reply.body.encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_PUT = _serve  # noqa: N815 -- as http.server wants them called

        def log_message(self, *_args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        told.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()


FLAVOR = {"Metadata-Flavor": "Google"}


def google_interface(*aliases: str, ip: str = "10.128.0.3", mask: str = "255.255.240.0") -> dict[str, Any]:
    """An interface as the metadata server shows it."""
    return {
        "accessConfigs": [{"externalIp": "203.0.113.7", "type": "ONE_TO_ONE_NAT"}],
        "dnsServers": ["169.254.169.254"],
        "forwardedIps": ["198.51.100.9"],
        "gateway": "10.128.0.1",
        "ip": ip,
        "ipAliases": list(aliases),
        "mac": "42:01:0a:80:00:03",
        "mtu": 1460,
        "network": "projects/1234/networks/default",
        "subnetmask": mask,
        "targetInstanceIps": [],
    }


class Google:
    """The metadata server: refuses what lacks the header, and holds a question until something changes."""

    def __init__(self, *interfaces: dict[str, Any]) -> None:
        self._changed = threading.Condition()
        self._interfaces: Any = interfaces
        self._version = 0x10
        self.stopping = False

    def set(self, *interfaces: dict[str, Any]) -> None:
        """Something changed."""
        with self._changed:
            self._interfaces, self._version = interfaces, self._version + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Let go of whoever waits."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def __call__(self, asked: Asked) -> Reply:
        """Answer one request."""
        if asked.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in asked.headers:
            return Reply("Missing Metadata-Flavor:Google header.", 403)
        url = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path != "/computeMetadata/v1/instance/network-interfaces/" or query.get("recursive") != "true":
            return Reply("not found", 404, FLAVOR)
        with self._changed:
            if query.get("wait_for_change") == "true":
                etag, seconds = query["last_etag"], float(query["timeout_sec"])
                self._changed.wait_for(lambda: self.stopping or etag != f"{self._version:x}", seconds)
            return Reply(json.dumps(self._interfaces), headers=FLAVOR | {"ETag": f"{self._version:x}"})
