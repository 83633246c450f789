"""A checkpoint as rows of plain values, and back. Pure.

Rows are (name, text or blob). Counters are the bulk of it, and go as two blobs per set: the addresses, packed, one
after the other, and their bytes and packets as native unsigned 64-bit numbers (a store never leaves its machine), or,
where one is larger, as text. Everything else is JSON, with -Infinity for a time that nobody knows.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

from netacct.accounting.closing import ClosingState
from netacct.accounting.exposure import ExposureState
from netacct.accounting.ledger import LedgerState, SetState
from netacct.accounting.series import Flow, SeriesState
from netacct.accounting.tallies import LeaseKey, TalliesState
from netacct.audit import AuditState, Pair, Place, Track
from netacct.model import Address, Count, CounterKey, Direction, Lease, Level, Pod, Scope, SeriesKey, key_width

Row: TypeAlias = tuple[str, str | bytes]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that must outlive the process: books, leases, what was shown, begin of the totals, accounts, audit.

    `began` (when the totals were 0) is Unix seconds, for display only.
    """

    ledger: LedgerState
    leases: tuple[Lease, ...]
    exposure: ExposureState
    began: float = 0.0
    closing: ClosingState = field(default_factory=ClosingState)
    audit: AuditState = field(default_factory=dict)


def encode(checkpoint: Checkpoint) -> list[Row]:
    """The rows of a checkpoint; `decode` takes them in any order."""
    return list(_encode(checkpoint))


def decode(rows: Mapping[str, str | bytes]) -> Checkpoint:
    """The checkpoint of these rows. Raises ValueError, LookupError, TypeError or AttributeError for others."""
    head = json.loads(rows["ledger"])
    series = json.loads(rows["series"])
    ledger = LedgerState(
        at=head["at"],
        read_at=head["read_at"],
        sets=dict(_decode_set(entry, rows) for entry in head["sets"]),
        series=SeriesState(
            totals=dict(zip(_series_keys(rows["totals"]), _pairs(rows["totals/counts"], Count), strict=True)),
            slots=tuple(
                (Level(level), tuple(name), tuple(target), active, _decode_pod(pod))
                for level, name, target, active, pod in series["slots"]
            ),
            ended=tuple((Level(level), tuple(name), at) for level, name, at in series["ended"]),
            capped=series["capped"],
            by_label=series.get("by_label", ""),  # of a version that had none
        ),
        pending=tuple(
            (bytes.fromhex(ip), start, end, after, dict(_decode_flow(flow) for flow in flows))
            for ip, start, end, after, flows in head["pending"]
        ),
        released={bytes.fromhex(ip): at for ip, at in head["released"]},
        resets=head["resets"],
        ambiguous_bytes=head["ambiguous_bytes"],
        tallies=_decode_tallies(rows),
    )
    leases = tuple(_decode_lease(lease) for lease in json.loads(rows["leases"]))
    closing = json.loads(rows["closing"])
    since = array("d", _blob(rows["totals/shown"]))
    shown = {
        key: None if math.isinf(first) else first
        for key, first in zip(ledger.series.totals, since, strict=True)
        if not math.isnan(first)
    }
    unwritten = ClosingState(tuple(map(_decode_lease, closing["leases"])), tuple(closing["lines"]))
    return Checkpoint(
        ledger, leases, ExposureState(shown), float(rows["began"]), unwritten, audit=dict(_decode_audit(rows))
    )


def _encode(checkpoint: Checkpoint) -> Iterator[Row]:
    ledger, shown = checkpoint.ledger, checkpoint.exposure.shown
    for number, known in enumerate(ledger.sets.values()):
        yield f"set/{number}/addresses", b"".join(known.counts)
        yield f"set/{number}/counts", _numbers(known.counts.values())
    head = {
        "at": ledger.at,
        "read_at": ledger.read_at,
        "sets": [(n, key, known.epoch, known.at) for n, (key, known) in enumerate(ledger.sets.items())],
        "pending": [
            (ip.hex(), start, end, after, [(*flow, *count) for flow, count in counts.items()])
            for ip, start, end, after, counts in ledger.pending
        ],
        "released": [(ip.hex(), at) for ip, at in ledger.released.items()],
        "resets": ledger.resets,
        "ambiguous_bytes": ledger.ambiguous_bytes,
    }
    yield "ledger", _json(head)
    yield "began", repr(checkpoint.began)
    series = ledger.series
    slots = [(*slot[:4], _encode_pod(slot[4])) for slot in series.slots]
    more = {"ended": series.ended, "capped": series.capped, "by_label": series.by_label}
    yield "series", _json({"slots": slots, **more})
    yield "totals", f"[{','.join(map(_key_text, series.totals))}]"
    yield "totals/counts", _numbers(series.totals.values())
    # When each was first shown, in the order of the totals: NaN is never, infinity that its true value was.
    since = array("d", [math.inf if (at := shown.get(key, math.nan)) is None else at for key in series.totals])
    yield "totals/shown", since.tobytes()
    yield "leases", _json([_encode_lease(lease) for lease in checkpoint.leases])
    yield from _encode_tallies(ledger.tallies)
    closing = checkpoint.closing
    yield from _encode_audit(checkpoint.audit)
    yield "closing", _json({"leases": [_encode_lease(lease) for lease in closing.leases], "lines": closing.lines})


@lru_cache(maxsize=4096)
def _key_text(key: SeriesKey) -> str:
    """A series' key as JSON; remembered, because making it anew is most of the work of a checkpoint."""
    return _json(key)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), check_circular=False)


def _numbers(pairs: Iterable[tuple[int, int]]) -> str | bytes:
    numbers = [*chain.from_iterable(pairs)]
    try:
        return array("Q", numbers).tobytes()
    except OverflowError:
        return _json(numbers)  # no wire carries so much, but a counter that somebody set can say so


def _pairs(row: str | bytes, kind: type[Any] = tuple) -> Iterator[Any]:
    """The pairs of a row of numbers, as plain tuples or as `kind(first, second)`."""
    numbers = json.loads(row) if isinstance(row, str) else array("Q", row)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return pairs if kind is tuple else (kind(*pair) for pair in pairs)


def _blob(value: str | bytes) -> bytes:
    if isinstance(value, str):
        raise TypeError("text where a blob belongs")
    return value


def _decode_set(entry: list[Any], rows: Mapping[str, str | bytes]) -> tuple[CounterKey, SetState]:
    number, (family, scope, direction, traffic), epoch, at = entry
    key = CounterKey(family, Scope(scope), Direction(direction), traffic)
    packed, counts = _blob(rows[f"set/{number}/addresses"]), list(_pairs(rows[f"set/{number}/counts"]))
    width = key_width(key)
    # A catch-all has one counter, under the empty address.
    addresses = (
        [packed[start : start + width] for start in range(0, len(packed), width)] if width else [b""] * len(counts)
    )
    return key, SetState(epoch, dict(zip(addresses, counts, strict=True)), at)


def _series_keys(text: str | bytes) -> list[SeriesKey]:
    return [
        SeriesKey(Level(level), tuple(labels), Direction(direction), traffic)
        for level, labels, direction, traffic in json.loads(text)
    ]


def _decode_flow(flow: list[Any]) -> tuple[Flow, Count]:
    direction, traffic, byte_count, packets = flow
    return (Direction(direction), traffic), Count(byte_count, packets)


def _encode_tallies(tallies: TalliesState) -> Iterator[Row]:
    """Each lease with the numbers of its flows in the list of all flows, and the counts of all in one blob."""
    flows: dict[Flow, int] = {}
    leases = [
        (key.ip.hex(), *key[1:], since, [flows.setdefault(flow, len(flows)) for flow in counts])
        for key, (since, counts) in tallies.items()
    ]
    yield "tallies", _json({"flows": list(flows), "leases": leases})
    yield "tallies/counts", _numbers(count for _, counts in tallies.values() for count in counts.values())


def _decode_tallies(rows: Mapping[str, str | bytes]) -> TalliesState:
    value, counts = json.loads(rows["tallies"]), deque(_pairs(rows["tallies/counts"], Count))
    flows: list[Flow] = [(Direction(direction), traffic) for direction, traffic in value["flows"]]
    return {
        LeaseKey(bytes.fromhex(ip), *rest): (since, {flows[number]: counts.popleft() for number in numbers})
        for ip, *rest, since, numbers in value["leases"]
    }


def _encode_audit(state: AuditState) -> Iterator[Row]:
    yield "audit", _json([(*place, track.holder, track.doubted) for place, track in state.items()])
    tracks = state.values()
    yield "audit/counts", _numbers(count for track in tracks for count in (*track.start, *track.mark, track.booked))


def _decode_audit(rows: Mapping[str, str | bytes]) -> Iterator[tuple[Place, Track]]:
    if "audit" not in rows:
        return  # of a version that had none
    counts = _pairs(rows["audit/counts"], Count)
    for (number, direction, holder, doubted), *five in zip(json.loads(rows["audit"]), *[counts] * 5, strict=True):
        start, mark, booked = Pair(*five[:2]), Pair(*five[2:4]), five[4]
        yield (number, Direction(direction)), Track(holder, start, mark, booked, doubted)


def _encode_pod(pod: Pod | None) -> tuple[Any, ...] | None:
    if pod is None:
        return None
    return (pod.namespace, pod.name, pod.uid, pod.workload_kind, pod.workload, pod.labels)


def _decode_pod(values: list[Any] | None) -> Pod | None:
    if values is None:
        return None
    namespace, name, uid, workload_kind, workload, labels = values
    return Pod(namespace, name, uid, workload_kind, workload, tuple((key, value) for key, value in labels))


def _encode_lease(lease: Lease) -> tuple[Any, ...]:
    times = (lease.created, lease.opened, lease.closed)
    return (lease.ip.hex(), _encode_pod(lease.pod), lease.sandbox, *times, sorted(lease.sources))


def _decode_lease(values: list[Any]) -> Lease:
    ip, pod_values, sandbox, created, opened, closed, sources = values
    pod = _decode_pod(pod_values)
    if pod is None:
        raise ValueError("a lease without a pod")
    address: Address = bytes.fromhex(ip)
    return Lease(address, pod, sandbox, created, opened, closed, frozenset(sources))
