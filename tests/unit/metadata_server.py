"""A small HTTP server on 127.0.0.1, for tests of what asks a cloud's metadata server."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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

    def wait_for(self, count: int, seconds: float = 5.0) -> None:
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
