"""What the agent answers at each path."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TypeAlias

from prometheus_client import CollectorRegistry

from netacct.export import wire
from netacct.export.exposition import encode
from netacct.export.wire import Request, Response

Handler: TypeAlias = Callable[[Request], Response]

Reasons: TypeAlias = Callable[[], Sequence[str]]
"""Why something is not well, one reason a line; nothing when it is. Shown to whoever asks."""

DEFAULT_TIMEOUT = 10.0
"""Prometheus' own default scrape timeout, for clients that name none."""

LONGEST_TIMEOUT = 60.0
_GZIP_LEVEL = 1  # of 350 kB in 0.6 ms; level 6 takes five times as long for a tenth less
_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # zlib.h, deflateInit2: +16 writes a gzip header


class MetricsEndpoint:
    """Serves a registry.

    Args:
        metrics: the registry to show, given the seconds within which it should be collected.
        max_requests: how many may be answered at once; beyond that a request gets 503 at once.
    """

    def __init__(self, metrics: Callable[[float], CollectorRegistry], max_requests: int = 40) -> None:
        self._metrics = metrics
        self._slots = threading.BoundedSemaphore(max_requests)
        self._refusal = f"{max_requests} scrapes are being answered already: try again later"

    def __call__(self, request: Request) -> Response:
        """The page in the format and the encoding that the request accepts."""
        if not self._slots.acquire(blocking=False):
            return wire.text(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal)
        try:
            return self._page(request)
        finally:
            self._slots.release()

    def _page(self, request: Request) -> Response:
        registry = self._metrics(scrape_timeout(request.header("x-prometheus-scrape-timeout-seconds")))
        names = request.parameters("name[]")
        shown = registry.restricted_registry(names) if names else registry
        body, content_type = encode(shown, request.header("accept"))
        headers = [("Vary", "Accept, Accept-Encoding")]
        if wire.accepts_gzip(request.header("accept-encoding")):
            packer = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW)
            body = packer.compress(body) + packer.flush()
            headers.append(("Content-Encoding", "gzip"))
        return Response(HTTPStatus.OK, body, content_type, tuple(headers))


def scrape_timeout(header: str) -> float:
    """The seconds that there are for a scrape, from X-Prometheus-Scrape-Timeout-Seconds.

    A quarter, at most half a second, is kept for the way back. What is not a positive number counts as not said.
    """
    try:
        seconds = float(header)
    except ValueError:
        seconds = DEFAULT_TIMEOUT
    if not math.isfinite(seconds) or seconds <= 0:
        seconds = DEFAULT_TIMEOUT
    seconds = min(seconds, LONGEST_TIMEOUT)
    return seconds - min(0.5, seconds / 4)


def health(reasons: Reasons) -> Handler:
    """200 and `ok`, or 503 and the reasons."""

    def answer(_request: Request) -> Response:
        found = reasons()
        if found:
            return wire.text(HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(found))
        return wire.text(HTTPStatus.OK, "ok")

    return answer


def page(html: str) -> Handler:
    """An HTML page that stays the same."""
    response = Response(HTTPStatus.OK, html.encode(), "text/html; charset=utf-8")
    return lambda _request: response


def routes(
    metrics: Handler, live: Reasons, ready: Reasons, html: str, telemetry_path: str = "/metrics"
) -> Mapping[str, Handler]:
    """The agent's paths. `/-/healthy` and `/-/ready` are what Prometheus calls its own."""
    alive, readiness = health(live), health(ready)
    return {
        "/": page(html),
        "/livez": alive,
        "/-/healthy": alive,
        "/readyz": readiness,
        "/-/ready": readiness,
        telemetry_path: metrics,
    }
