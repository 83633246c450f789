"""A source that follows the files in which a CNI plugin keeps its state, and which name pods without their uid.

Goal
    Tell whose an address is where nobody else can: on a node whose CNI results are out of reach.

Tension
    Claims of the lease book are told apart by uid. What a file without uids says of a pod would be a second claim
    beside the one of whoever knows the uid, and the bytes of one pod would be two pods'.

Decision
    So this source gives hints. It speaks of an address only where nobody else vouches for it, and not before others had
    the time to (`PATIENCE`, during which bytes wait for their owner). When somebody vouches it takes its word back, and
    has no more to say of that pod: whoever knew it also knows when it has gone. A pod that came and went meanwhile,
    and that nobody else saw, it still tells.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from netacct import clock, log, plainfile
from netacct.following import Follower, Pace, entries
from netacct.identity import veth
from netacct.identity.cni_cache import is_name
from netacct.identity.heard import Heard
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.identity.stamp import Stamp, stamp_of
from netacct.model import UNBOUNDED, Address, Observation, Pod
from netacct.policy import local_range_fault

PATIENCE = 45.0
"""Seconds that others have: the longest pause of a source that polls. Much less than late binding."""

POLL = 60.0
"""Seconds between looks when nothing was signalled."""

DEBOUNCE = 0.02
"""Seconds between the first sign of a change and the reading."""

SIZE_LIMIT = 16 << 20
"""Bytes of a file; a real one has some kB per pod."""


class Entry(NamedTuple):
    """What a file says of one address. `made` is when it was given (Unix seconds), None where the file has no time."""

    ip: Address
    namespace: str
    name: str
    sandbox: str
    made: float | None = None


Decode: TypeAlias = Callable[[Mapping[str, Any]], Iterator[Entry]]
"""The entries of a document; raises ValueError where it has another form, in words that go on after the file's name."""


class _Read(NamedTuple):
    """What was found in a file. `stamp` tells whether it is still the same; `seen` has each entry's `created`."""

    stamp: Stamp
    seen: dict[Entry, float]


class _Waiting(NamedTuple):
    """An entry that nobody vouched for yet: since when, and what there is to say of it."""

    since: float
    hint: Observation


class StateFileSource:
    """Follows such files and gives hints.

    A missing file is an empty one, and the source absent where all are. One that is not understood (half written, or of
    another version) takes nothing back: the last good content holds. Locks of the files' writers are never taken.

    Args:
        name: of the source.
        files: their paths, and how to decode each.
        patience: seconds that others have to vouch for an address.
        poll: seconds between looks when nothing was signalled.
    """

    def __init__(self, name: str, files: Mapping[str, Decode], patience: float = PATIENCE, poll: float = POLL) -> None:
        self.name = name
        self._decoders, self._patience = dict(files), patience
        self._read: dict[str, _Read] = {}
        self._told: dict[Entry, Observation] = {}
        self._waiting: dict[Entry, _Waiting] = {}
        self._settled: set[Entry] = set()
        self._complete = False
        self._heard = Heard()
        self._began: float | None = None
        self._health = Health(up=False, reason="not started", present=False)
        self._emit: Callable[[SourceEvent], None] = lambda _: None
        self._log = log.get(source=name)
        pace = Pace(poll, DEBOUNCE, DEBOUNCE)
        self._follower = Follower(self._wanted, lambda _: self._look(), pace, f"source-{name}", self._log)

    def learn(self, event: SourceEvent) -> None:
        """Hear what another source says. May be called from any thread, also before `start`; never blocks for long."""
        if event.source in (self.name, veth.SOURCE):
            return  # veth's word is somebody else's, and that may be this one's
        self._heard.note(event)
        if self._read:
            self._follower.wake()

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Read the files once, in this call, then follow them in a thread. Nothing is told before others had time."""
        self._emit = emit
        self._follower.start()

    def stop(self) -> None:
        """End the thread and free everything."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the reason, while a file is not as it should be; absent where there is none."""
        return self._health

    def _wanted(self) -> Iterator[tuple[str, str]]:
        for path in self._decoders:
            yield from entries(path)

    def _look(self) -> None:
        troubles = []
        for path in self._decoders:
            try:
                self._look_at(path)
            except (OSError, ValueError) as error:
                why = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
                troubles.append(f"{path} {why}")
        health = Health(up=not troubles, reason="; ".join(troubles))
        if not troubles and not self._read:
            health = Health(up=False, reason=f"there is no {' or '.join(self._decoders)}", present=False)
        if troubles and health != self._health:
            self._log.warning("the state of the CNI plugin is not understood, what is known holds", error=health.reason)
        self._health = health
        self._tell(clock.now())

    def _look_at(self, path: str) -> None:
        """Bring what is known of one file up to date. Raises OSError, and ValueError where it is not understood."""
        try:
            with open(path, "rb", opener=plainfile.opener) as file:
                stamp = stamp_of(os.fstat(file.fileno()))
                known = self._read.get(path)
                if known is not None and known.stamp == stamp:
                    return
                data = file.read(SIZE_LIMIT + 1)
        except (FileNotFoundError, NotADirectoryError):
            self._read.pop(path, None)
            return
        found = _decode(data, self._decoders[path])
        now = clock.now()
        new = UNBOUNDED if known is None else min(now, clock.from_wall(stamp[0] / 1e9))
        seen = {}
        for entry in found:
            made = new if entry.made is None else min(now, clock.from_wall(entry.made))
            seen[entry] = known.seen.get(entry, made) if known else made
        self._read[path] = _Read(stamp, seen)

    def _tell(self, at: float) -> None:
        """Emit what is to be said now and was not said before, and see to it that what has to wait is said then."""
        began = self._began = at if self._began is None else self._began
        there = {entry: created for read in self._read.values() for entry, created in read.seen.items()}
        vouched = {seen.ip for seen in self._heard.observations()}
        self._settled = {entry for entry in there if entry in self._settled or entry.ip in vouched}
        before = self._waiting
        self._waiting = {
            entry: before.get(entry) or _Waiting(at, self._observe(entry, created, at))
            for entry, created in there.items()
            if entry not in self._settled
        }
        ripe = at - self._patience
        due = {entry: waiting.hint for entry, waiting in self._waiting.items() if waiting.since <= ripe}
        self._say(due, [waiting.hint for entry, waiting in before.items() if entry not in there], at)
        if not self._complete and began <= ripe:
            self._complete = True
            self._emit(Replace(self.name, tuple(due.values()), at))
        times = [waiting.since for waiting in self._waiting.values() if waiting.since > ripe]
        if not self._complete:
            times.append(began)
        if times:
            self._follower.again(max(min(times) - ripe, 0.05))

    def _say(self, due: dict[Entry, Observation], ended: list[Observation], at: float) -> None:
        """Emit how these hints differ from those told. `ended` are those whose entries have gone, told or not."""
        gone = [hint for entry, hint in self._told.items() if entry not in due]
        new = [hint for entry, hint in due.items() if entry not in self._told]
        brief = [hint for hint in ended if hint not in gone]
        self._told = due
        last = [replace(hint, present=False, seen_at=at) for hint in (*gone, *brief)]
        if brief or (self._complete and (new or last)):
            self._emit(Update(self.name, (*brief, *new, *last)))

    def _observe(self, entry: Entry, created: float, at: float) -> Observation:
        return Observation(self.name, entry.ip, Pod(entry.namespace, entry.name, ""), entry.sandbox, created, at)


def entry(address: object, namespace: object, name: object, sandbox: object, made: float | None = None) -> Entry | None:
    """An entry from what a file says, "" for what it does not; None where that is no pod's address.

    Raises:
        ValueError: the address is none.
    """
    if not is_name(namespace) or not is_name(name):
        return None
    try:
        ip = ipaddress.ip_address(str(address))
    except ValueError:
        raise ValueError(f"has {str(address)[:60]!r} for an address") from None
    if local_range_fault(ipaddress.ip_network(ip)):
        return None
    return Entry(ip.packed, str(namespace), str(name), sandbox if isinstance(sandbox, str) else "", made)


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is an object of JSON, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _decode(data: bytes, decode: Decode) -> tuple[Entry, ...]:
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"has more than {SIZE_LIMIT} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON, or cut off" if data else "is empty") from None
    if not isinstance(document, dict):
        raise ValueError("is no object")  # noqa: TRY004 -- the contract is ValueError, whatever is wrong
    return tuple(dict.fromkeys(decode(document)))
