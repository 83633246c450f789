"""Follows a collection of Kubernetes objects: lists it once, then watches, for ever, without hurting an API server.

The protocol is that of client-go's Reflector (k8s.io/client-go/tools/cache/reflector.go) and of "Efficient detection of
changes" in Kubernetes' API concepts. 7,500 agents whose API server restarts must not be the reason that it does not
come back; so between two requests there is a pause that grows, drawn anew each time, also after a watch that ended as
it should, and a list is always one from the API server's memory, never of etcd.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias
from urllib.parse import urlencode

from netacct import clock, log
from netacct.errors import NetacctError
from netacct.identity.https import Answer, EndedError, Exchange
from netacct.identity.json_list import ITEM_LIMIT, JsonList
from netacct.identity.source import Health
from netacct.log import Repeats
from netacct.sleeper import Sleeper, Why

LIST_SECONDS = 70.0
"""For a list, as a whole: an API server gives up after 60 s (--request-timeout)."""

WATCH_SECONDS = (300.0, 600.0)
"""The server is asked to end a watch after a time between these, as client-go does, so that they spread out."""

MARGIN_SECONDS = 10.0
"""So much later we end it ourselves."""

ANY = "0"
"""As `resourceVersion` of a list: whatever the API server has in memory."""

TROUBLE_SECONDS = 300.0
"""The same trouble is logged again after so long."""

RETRY_AFTER_LIMIT = 300.0

Object: TypeAlias = Mapping[str, Any]
"""A Kubernetes object, as JSON."""


class Api(Protocol):
    """Who makes the requests: netacct.identity.kube_api.KubeApi."""

    def get(self, exchange: Exchange, target: str, seconds: float) -> Answer:
        """The answer to GET `target`, whatever its status; raises NetacctError where there is none."""
        ...

    def forget(self) -> None:
        """The credentials were refused."""
        ...


@dataclass(slots=True)
class Backoff:
    """client-go's pauses (NewExponentialBackoffManager, with the Reflector's numbers); `roll` draws from 0 to 1."""

    first: float = 0.8
    limit: float = 30.0
    reset: float = 120.0
    roll: Callable[[], float] = random.random
    _pause: float = 0.0
    _last: float = -math.inf

    def next(self, now: float) -> float:
        """Seconds to pause: twice the last ones up to the limit, and up to as much again by chance.

        Args:
            now: seconds of any steady clock; after a quiet time of `reset` seconds the pauses begin anew.
        """
        grown = min(self._pause * 2, self.limit)
        self._pause = self.first if now - self._last > self.reset else grown
        self._last = now
        return self._pause * (1 + self.roll())


class Pace(NamedTuple):
    """How long things take, in seconds: a list, a watch (drawn between two), and the pauses."""

    listing: float = LIST_SECONDS
    watch: tuple[float, float] = WATCH_SECONDS
    backoff: Callable[[], Backoff] = Backoff


class ExpiredError(NetacctError):
    """What is asked for has been forgotten (410 Gone), or has not come yet (resourceVersion too large)."""


class RefusedError(NetacctError):
    """The API server says no; `retry_after` is how many seconds it wants to be left alone."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Reflector:
    """Keeps somebody up to date about a collection, from a thread of its own.

    Args:
        api: who makes the requests; this reflector's own.
        path: of the collection, as `/api/v1/pods`.
        params: of list and watch, as {"fieldSelector": "spec.nodeName=node1"}.
        on_replace: gets all objects that there are, one by one while they are read. What it raises, or what breaks off,
            makes the list void; then the next one comes from the beginning.
        on_event: gets "ADDED", "MODIFIED" or "DELETED" and the object, as it is now or was at last.
        pace: how long things take.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        params: Mapping[str, str],
        on_replace: Callable[[Iterator[Object]], None],
        on_event: Callable[[str, Object], None],
        pace: Pace | None = None,
    ) -> None:
        self._api, self._path, self._params = api, path, dict(params)
        self._on_replace, self._on_event = on_replace, on_event
        self._pace = pace or Pace()
        self._backoff = self._pace.backoff()
        self._version, self._listed = ANY, False
        self._health = Health(up=False, reason="not asked yet")
        self._heard: float | None = None
        self._exchange = Exchange()
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._log = log.get(collection=path, **self._params)
        self._sleeper = Sleeper("reflector")

    def start(self) -> None:
        """Begin, in a thread."""
        self._sleeper.start(self._run)

    def stop(self) -> None:
        """End the thread, also while it waits for the server. Idempotent; a stopped reflector starts no more."""
        self._exchange.end()
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Whether the last request was granted; `age` is how long ago the server last said anything."""
        return self._health._replace(age=None if self._heard is None else clock.now() - self._heard)

    def _run(self) -> None:
        pause = 0.0
        while self._sleeper.sleep(pause) is not Why.STOP:
            pause = self._turn()

    def _turn(self) -> float:
        """One request; returns how long to pause before the next."""
        wanted = 0.0
        try:
            if not self._listed:
                self._list()
                return 0.0
            self._watch()
        except EndedError:
            return self._backoff.first  # nobody waits for it: the thread is told to end now
        except ExpiredError as error:
            self._listed, self._version = False, ANY
            self._log.debug("listing anew", why=str(error))
        except Exception as error:  # noqa: BLE001 -- a reflector that died would go unnoticed
            self._trouble(
                error if isinstance(error, NetacctError) else NetacctError(f"{type(error).__name__}: {error}")
            )
            wanted = error.retry_after if isinstance(error, RefusedError) else 0.0
        finally:
            self._exchange.close()
        return min(wanted, RETRY_AFTER_LIMIT) + self._backoff.next(time.monotonic())

    def _trouble(self, error: NetacctError) -> None:
        self._health = Health(up=False, reason=str(error))
        if self._repeats.due(str(error)):
            self._log.warning("cannot follow the API server, trying again", error=str(error))

    def _list(self) -> None:
        answer = self._ask({"resourceVersion": self._version}, self._pace.listing)
        listed = JsonList(answer.chunks(time.monotonic() + self._pace.listing, math.inf))
        objects = (each for each in listed.items() if isinstance(each, dict))
        try:
            self._on_replace(objects)
            for _ in objects:
                pass  # what nobody wanted to see: the version may come after it
        except ValueError as error:
            raise NetacctError(f"what the API server answers {error}") from error
        self._version, self._listed = listed.resource_version or ANY, True
        self._good()

    def _watch(self) -> None:
        seconds = random.uniform(*self._pace.watch)  # noqa: S311 -- spreads requests, guards nothing
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(max(1, round(seconds)))}
        answer = self._ask({"resourceVersion": self._version, **asked}, self._pace.listing)
        self._good()
        rest = b""
        for chunk in answer.chunks(time.monotonic() + seconds + MARGIN_SECONDS, math.inf):
            self._heard = clock.now()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                self._hear(line)
            if len(rest) > ITEM_LIMIT:
                self._void(f"an event has more than {ITEM_LIMIT} bytes")

    def _hear(self, line: bytes) -> None:
        """One event of a watch. What is half a line at its end is never heard: it comes again."""
        try:
            event = json.loads(line)
            kind, changed = event["type"], event["object"]
            version = changed["metadata"]["resourceVersion"] if kind != "ERROR" else ""
            code = int(_number(changed.get("code"))) if kind == "ERROR" else 0
        except (ArithmeticError, AttributeError, ValueError, RecursionError, LookupError, TypeError):
            self._void("an event is no event")
        if kind == "ERROR":
            self._listed = code == HTTPStatus.TOO_MANY_REQUESTS  # anything else could come again and again
            raise _refusal(code, str(changed.get("message")))
        if kind != "BOOKMARK":
            self._on_event(kind, changed)
        self._version = version

    def _void(self, why: str) -> NoReturn:
        """Believe nothing of what this watch says, and list anew."""
        self._listed = False
        raise NetacctError(f"{self._path}: {why}")

    def _ask(self, params: Mapping[str, str], seconds: float) -> Answer:
        target = f"{self._path}?{urlencode({**self._params, **params})}"
        answer = self._api.get(self._exchange, target, seconds)
        if answer.status == HTTPStatus.OK:
            return answer
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self._api.forget()
        message = answer.text()
        if answer.status == HTTPStatus.FORBIDDEN:
            message += f"; grant list and watch on {self._path} (docs/identity.md)"
        raise _refusal(answer.status, message, _number(answer.headers.get("Retry-After")))

    def _good(self) -> None:
        self._heard = clock.now()
        if not self._health.up:
            self._log.info("following the API server")
        self._health = Health(up=True)


def _refusal(code: int, message: str, retry_after: float = 0.0) -> NetacctError:
    """The error that a status stands for (k8s.io/apimachinery, meta/v1.Status)."""
    words = f"the API server answers {code}: {message}"
    if code == HTTPStatus.GONE or "Too large resource version" in message:
        return ExpiredError(words)
    return RefusedError(words, retry_after)


def _number(value: object) -> float:
    """A number of seconds or a status code; 0 where it is none (Retry-After may be a date, which nobody sends)."""
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return 0.0
