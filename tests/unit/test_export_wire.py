"""HTTP as bytes: what is taken for a request, and how a response is written."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct.export.wire import BadRequestError, Response, accepts_gzip, parse, serialise, text

HOST = b"\r\nHost: node-1:19112"


def test_a_request_is_read_with_decoded_path_query_and_fields() -> None:
    """Path and query are separated, field names compare without case, and repeated fields are joined."""
    request = parse(b"GET /met%72ics?name[]=a&name[]=b HTTP/1.1" + HOST + b"\r\nACCEPT: x\r\naccept:\ty ")
    assert (request.method, request.path) == ("GET", "/metrics")
    assert request.parameters("name[]") == ["a", "b"]
    assert request.header("accept") == "x, y"
    assert request.header("absent") == ""
    assert request.reusable


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://node-1:19112/metrics?a=b", "/metrics"),
        (b"HTTP://node-1", "/"),
        (b"//metrics", "//metrics"),
        (b"/caf%c3%a9", "/café"),
        (b"/%ff", "/\ufffd"),
    ],
)
def test_both_forms_of_a_target_are_understood(target: bytes, path: str) -> None:
    """A server must accept the absolute form too, and a path that starts with two slashes names no host."""
    assert parse(b"GET " + target + b" HTTP/1.1" + HOST).path == path


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"GET / HTTP/1.1" + HOST, True),
        (b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 0", True),
        (b"GET / HTTP/1.1" + HOST + b"\r\nConnection: keep-alive, Close", False),
        (b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 5", False),
        (b"GET / HTTP/1.1" + HOST + b"\r\nTransfer-Encoding: chunked", False),
        (b"GET / HTTP/1.0", False),
    ],
)
def test_a_connection_is_reused_only_where_the_next_request_is_sure_to_start(head: bytes, *, reusable: bool) -> None:
    """A body is never read, so after one the connection ends; so it does when the client says so, and in HTTP/1.0."""
    assert parse(head).reusable is reusable


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", HTTPStatus.BAD_REQUEST),
        (b"GET", HTTPStatus.BAD_REQUEST),
        (b"GET /", HTTPStatus.BAD_REQUEST),
        (b"GET  / HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"G\x00T / HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET * HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET /\xc3\xa9 HTTP/1.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\nA : b", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\n folded", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\nno colon", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1" + HOST + b"\r\nA: b\nC: d", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/x.1" + HOST, HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/2.0" + HOST, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1" + HOST, HTTPStatus.REQUEST_URI_TOO_LONG),
    ],
)
def test_what_is_no_request_is_refused_with_the_status_that_says_why(head: bytes, status: HTTPStatus) -> None:
    """Malformed heads give 400, unknown versions 505 and long request lines 414."""
    with pytest.raises(BadRequestError) as error:
        parse(head)
    assert error.value.status is status


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda junk: b"GET /" + junk + b" HTTP/1.1" + HOST + junk))
def test_any_bytes_are_a_request_or_refused(head: bytes) -> None:
    """Parsing raises nothing but BadRequestError, whatever comes."""
    try:
        request = parse(head)
    except BadRequestError:
        return
    assert request.path
    assert request.method.isascii()


def test_a_response_is_written_with_length_and_security_header() -> None:
    """The head carries status, length, nosniff and the fields of this response, and HEAD gets no body."""
    response = Response(HTTPStatus.OK, b"body", "text/plain", (("Vary", "Accept"),))
    written = serialise(response, "Sun, 06 Nov 1994 08:49:37 GMT", close=True)
    head, body = written.split(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"Server: netacct",
        b"Date: Sun, 06 Nov 1994 08:49:37 GMT",
        b"Content-Type: text/plain",
        b"Content-Length: 4",
        b"X-Content-Type-Options: nosniff",
        b"Vary: Accept",
        b"Connection: close",
    ]
    assert body == b"body"
    headless = serialise(response, "Sun, 06 Nov 1994 08:49:37 GMT", close=False, head_only=True)
    assert headless.endswith(b"Content-Length: 4\r\nX-Content-Type-Options: nosniff\r\nVary: Accept\r\n\r\n")


def test_a_text_without_a_body_says_its_status() -> None:
    """The status in words is the body where there is no other."""
    assert text(HTTPStatus.NOT_FOUND).body == b"Not Found\n"


@pytest.mark.parametrize(
    ("field", "accepted"),
    [
        ("", False),
        ("identity", False),
        ("gzip", True),
        ("GZip", True),
        ("x-gzip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip ; q=0.1", True),
        ("*", True),
        ("*;q=0", False),
        ("gzip;q=0, *", False),
        ("gzip;q=nan", False),
        ("gzip;q=2", False),
        ("gzipped", False),
    ],
)
def test_gzip_is_used_only_where_the_client_allows_it(field: str, *, accepted: bool) -> None:
    """A weight of 0 refuses it, `*` allows it unless it is named, and a weight that is none refuses it."""
    assert accepts_gzip(field) is accepted
