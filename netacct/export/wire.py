"""HTTP/1.1 as bytes (RFC 9110, RFC 9112): a request head in, a response out. Pure.

Only what a metrics endpoint needs: requests without a body, responses with a known length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

MAX_HEAD = 16 * 1024
"""Bytes of request line and header fields together. Browsers and Prometheus stay under 2 KiB."""

MAX_REQUEST_LINE = 8 * 1024
"""RFC 9112, section 3, recommends to support at least 8,000 bytes."""

HEAD_END = b"\r\n\r\n"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VERSION = re.compile(r"HTTP/(\d)\.(\d)")
_TEXT = "text/plain; charset=utf-8"


class BadRequestError(Exception):
    """What came is no request that we serve; `status` says why, and the connection must end."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """The head of one request.

    `path` is percent-decoded; `headers` has lower-case names, fields that came twice joined by a comma; `reusable` says
    whether the connection may carry another request after this one.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    reusable: bool = False

    def header(self, name: str) -> str:
        """The value of the field (name in lower case), or ""."""
        return self.headers.get(name, "")

    def parameters(self, name: str) -> list[str]:
        """All values of a query parameter; values that are not UTF-8 are read as well as they can be."""
        return parse_qs(self.query).get(name, [])


class Response(NamedTuple):
    """A status, a body, and the fields that are not the same for every response."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


def text(status: HTTPStatus, body: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """A plain text response; without `body` it is the status in words."""
    return Response(status, f"{body or status.phrase}\n".encode(), _TEXT, headers)


def parse(head: bytes) -> Request:
    """The request in `head`, which is everything up to the empty line (without it).

    Raises BadRequestError for anything that RFC 9112 does not allow or that we do not serve: strict, because there is
    no old client that we would have to bear with.
    """
    lines = head.decode("latin-1").split("\r\n")  # field values may hold any byte above 127 (obs-text)
    if len(lines[0]) > MAX_REQUEST_LINE:
        raise BadRequestError(HTTPStatus.REQUEST_URI_TOO_LONG)
    method, target, minor = _request_line(lines[0])
    headers = _fields(lines[1:])
    if minor and ("host" not in headers or "," in headers["host"]):
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    path, query = _target(target)
    bodiless = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
    closing = "close" in [option.strip().lower() for option in headers.get("connection", "").split(",")]
    return Request(method, path, query, headers, reusable=bool(minor) and bodiless and not closing)


def _request_line(line: str) -> tuple[str, str, int]:
    parts = line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not re.fullmatch(r"[!-~]+", parts[1]):
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    version = _VERSION.fullmatch(parts[2])
    if version is None:
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    if version[1] != "1":
        raise BadRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    return parts[0], parts[1], int(version[2])


def _fields(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        # The token test also refuses a space before the colon and a folded line, which RFC 9112 wants refused.
        if not colon or not _TOKEN.fullmatch(name) or any(ord(c) < 32 and c != "\t" for c in value):
            raise BadRequestError(HTTPStatus.BAD_REQUEST)
        name = name.lower()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _target(target: str) -> tuple[str, str]:
    if not target.startswith("/"):  # absolute-form, which a server must understand though only proxies are sent it
        found = re.fullmatch(r"https?://[^/?#]+(/?.*)", target, re.IGNORECASE)
        if found is None:
            raise BadRequestError(HTTPStatus.BAD_REQUEST)
        target = found[1]
    path, _, query = target.partition("?")
    return unquote(path) or "/", query


def serialise(response: Response, date: str, *, close: bool, head_only: bool = False) -> bytes:
    """The response as bytes. `date` is the present time as an IMF-fixdate; `head_only` leaves the body out (HEAD)."""
    fields = [
        ("Server", "netacct"),
        ("Date", date),
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        ("X-Content-Type-Options", "nosniff"),
        *response.headers,
        *([("Connection", "close")] if close else []),
    ]
    head = [
        f"HTTP/1.1 {response.status.value} {response.status.phrase}",
        *(f"{name}: {value}" for name, value in fields),
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii", "replace") + (b"" if head_only else response.body)


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding field allows gzip (RFC 9110, section 12.5.3): named, or by `*`, and not with q=0."""
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        coding, _, parameter = (part.strip() for part in item.partition(";"))
        weights[coding] = _weight(parameter)
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _weight(parameter: str) -> float:
    name, _, value = parameter.partition("=")
    if not parameter:
        return 1.0
    return float(value) if name.strip() == "q" and re.fullmatch(r"[01](\.\d{0,3})?", value.strip()) else 0.0
