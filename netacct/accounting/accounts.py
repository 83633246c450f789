"""An account: what one lease got from its opening to its end, as a value and as a line of JSON. Pure.

The format is documented in docs/accounts.md. A reader takes lines with fields that it does not know, so that fields may
be added; what is there keeps its meaning.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from netacct.accounting.series import Flow
from netacct.accounting.tallies import Tally, key_of
from netacct.model import Count, Direction, Lease, unpack


class State(enum.StrEnum):
    """How an account ended."""

    CLOSED = "closed"  # with its lease: the counts are final
    INTERRUPTED = "interrupted"  # by a reboot or a lost state: counted until `end`, what came after is not known
    OPEN = "open"  # not yet: counted until `end`, which is when it was written


class Origin(NamedTuple):
    """Where and in which boot accounts come from: the node's name and the kernel's boot id."""

    node: str
    boot: str


@dataclass(frozen=True, slots=True)
class Account:
    """One record. `start` and `end` are Unix seconds; `seconds` lie between them, by a clock that nobody sets."""

    id: str
    state: State
    node: str
    namespace: str
    pod: str
    uid: str
    workload_kind: str
    workload: str
    labels: Mapping[str, str]
    ip: str
    sandbox: str
    start: float
    end: float
    seconds: float
    counts: Mapping[Flow, Count]


def account(
    lease: Lease, tally: Tally, end: float, state: State, origin: Origin, to_wall: Callable[[float], float]
) -> Account:
    """The account of a lease that got `tally` until `end` (seconds since boot; `to_wall` makes Unix seconds of it)."""
    pod = lease.pod
    return Account(
        id=identity(lease, tally, origin),
        state=state,
        node=origin.node,
        namespace=pod.namespace,
        pod=pod.name,
        uid=pod.uid,
        workload_kind=pod.workload_kind,
        workload=pod.workload,
        labels=dict(pod.labels),
        ip=unpack(lease.ip),
        sandbox=lease.sandbox,
        start=to_wall(tally.since),
        end=to_wall(end),
        seconds=end - tally.since,
        counts={flow: count for flow, count in tally.counts.items() if any(count)},
    )


def identity(lease: Lease, tally: Tally, origin: Origin) -> str:
    """The same for every record of the same tenure, different for all others, on whatever node: 16 hex digits."""
    key = (origin.boot, key_of(lease).uid, lease.pod.namespace, lease.pod.name, lease.ip.hex(), lease.opened)
    return hashlib.blake2b(repr((key, lease.sandbox, tally.since)).encode(), digest_size=8).hexdigest()


def encode(record: Account) -> str:
    """The record as one line of ASCII, without its end."""
    value = {
        "id": record.id,
        "state": record.state,
        "node": record.node,
        "namespace": record.namespace,
        "pod": record.pod,
        "uid": record.uid,
        "workload_kind": record.workload_kind,
        "workload": record.workload,
        "labels": record.labels,
        "ip": record.ip,
        "sandbox": record.sandbox,
        "start": timestamp(record.start),
        "end": timestamp(record.end),
        "seconds": round(record.seconds, 3),
        "receive": traffic_of(record.counts, Direction.RECEIVE),
        "transmit": traffic_of(record.counts, Direction.TRANSMIT),
    }
    return json.dumps(value, separators=(",", ":"))


def decode(line: str) -> Account:
    """The record of a line. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
        return Account(
            **{name: _text(value[name]) for name in _TEXTS},
            state=State(value["state"]),
            labels={label: _text(text) for label, text in value["labels"].items()},
            start=_unix_seconds(value["start"]),
            end=_unix_seconds(value["end"]),
            seconds=float(value["seconds"]),
            counts={
                (direction, traffic): Count(_natural(count["bytes"]), _natural(count["packets"]))
                for direction in Direction
                for traffic, count in value[direction].items()
            },
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no account: {error!r}") from error


def traffic_of(counts: Mapping[Flow, Count], direction: Direction) -> dict[str, dict[str, int]]:
    """Bytes and packets by traffic class of one direction, as JSON has them."""
    chosen = sorted((flow[1], count) for flow, count in counts.items() if flow[0] is direction)
    return {traffic: {"bytes": count.bytes, "packets": count.packets} for traffic, count in chosen}


def timestamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_TEXTS = ("id", "node", "namespace", "pod", "uid", "workload_kind", "workload", "ip", "sandbox")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _unix_seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
