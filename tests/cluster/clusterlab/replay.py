"""Books a recorded run again, as an agent would have that hears one source only (`recorder.py` has the record)."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from clusterlab import classes
from clusterlab.agents import UNATTRIBUTED
from clusterlab.classes import Series, Totals
from clusterlab.recorder import Call
from clusterlab.truth import Count
from netacct import config
from netacct.accounting.store import Store
from netacct.books import Books
from netacct.model import Level, Observation, Snapshot

_SETTINGS = {"metrics": {"zero_first": "0s", "retention": "1h"}}


class Replay(NamedTuple):
    """What one source made of a run.

    Attributes:
        counted: what was booked from the given time on.
        seen: (namespace, name) of the pods that it said hold an address.
    """

    counted: Totals
    seen: set[tuple[str, str]]


def calls(record: Path) -> Iterator[Call]:
    """The calls of a record that may still be written to."""
    with record.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield Call(*pickle.load(file))  # noqa: S301 -- written by this test's own agent


def said_by(record: Path, source: str) -> Iterator[tuple[float, Observation]]:
    """What a source said, and when it was heard."""
    for call in calls(record):
        if call.method == "note" and call.arguments[0].source == source:
            yield from ((call.at, seen) for seen in call.arguments[0].observations)


def replay(record: Path, source: str, folder: Path, begin: float) -> Replay:
    """Book what one source said, and all readings.

    Args:
        record: of a run.
        source: whose word counts.
        folder: an empty one, for what books keep on disk.
        begin: CLOCK_BOOTTIME seconds; what was booked by then is left out.
    """
    books = _books(folder, source)
    before: Totals | None = None
    begun = False
    for call in calls(record):
        if call.at >= begin and before is None:
            before = _totals(books)
        if call.method == "note" and call.arguments[0].source != source:
            continue
        if call.method == "take" and not begun:  # what the counters had before the record is no part of it
            books.ledger.baseline(call.arguments[0], call.arguments[0].at)
            begun = True
        getattr(books, call.method)(*call.arguments, **call.keywords)
    _bind(books)
    seen = {(seen.pod.namespace, seen.pod.name) for _, seen in said_by(record, source) if seen.present}
    return Replay(classes.since(_totals(books), before or {}), seen)


def _books(folder: Path, source: str) -> Books:
    path = folder / "netacct.yaml"
    path.write_text(json.dumps({**_SETTINGS, "accounts_dir": str(folder / "accounts")}), encoding="ascii")
    return Books(Store(folder / "state"), config.load(str(path)), (source,))


def _bind(books: Books) -> None:
    """Make the changes that no reading followed; then let those bytes go whose owner nobody has named for so long."""
    at = books.ledger.at
    books.commit(at)
    late = at + config.load("/dev/null").identity.late_binding + 1.0
    books.settle(Snapshot(late, ()), late)


def _totals(books: Books) -> Totals:
    found: Totals = {}
    for key, count in books.ledger.totals.items():
        if key.level in (Level.POD, Level.UNATTRIBUTED):
            namespace, pod = key.labels or ("", UNATTRIBUTED)
            found[Series(namespace, pod, key.direction.value, key.traffic)] = Count(*count)
    return found
