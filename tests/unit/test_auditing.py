"""Which pods are compared, what is summed for them, and when nothing can be said; the audit's state in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import pytest

from netacct import clock, config
from netacct.accounting.encoding import Checkpoint, decode, encode
from netacct.accounting.exposure import ExposureState
from netacct.accounting.ledger import Ledger
from netacct.accounting.store import Place, Store
from netacct.audit import NO_INTERFACE, RDMA, Pair, Track
from netacct.auditing import Auditing
from netacct.books import Books
from netacct.counting import Counting
from netacct.export.native import Collected
from netacct.identity.source import Replace
from netacct.kernel.interfaces import PodLink, Traffic
from netacct.kernel.rdma import PortBytes
from netacct.model import (
    UNCLASSIFIED,
    WHOLE,
    Address,
    Count,
    CounterKey,
    Direction,
    Observation,
    Pod,
    Reading,
    Scope,
    Snapshot,
    pack,
)

MB = 1_000_000
IPS = [pack(ip) for ip in ("10.0.0.1", "fd00::1", "10.0.0.2")]
KEY = CounterKey(4, Scope.POD, Direction.TRANSMIT, "internet")
REST = CounterKey(4, Scope.REST, Direction.TRANSMIT, "internet")


class FakeLinks:
    """Interfaces whose counters are what the test says; any may refuse."""

    def __init__(self, *links: PodLink) -> None:
        self.links, self.sent, self.refuses = links, 0, False

    def find(self, wanted: Collection[Address]) -> list[PodLink]:
        """Those that have a wanted address."""
        return [link for link in self.links if link.addresses & set(wanted)]

    def read(self) -> Mapping[int, Traffic]:
        """The same transmit counter for each."""
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
        return {link.number: Traffic(Count(0, 0), Count(self.sent, self.sent // 1000)) for link in self.links}


class FakeCounting:
    """Readings that the test makes up, settled in real books."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.snapshot = Snapshot(0.0, ())
        self.collected: dict[str, Collected] = {}
        self.counted = self.rest = 0
        self.unreadable: tuple[CounterKey, ...] = ()

    def refresh(self) -> None:
        """Settle what is counted now."""
        at = clock.now()
        counts = {IPS[0]: (self.counted, self.counted // 1000)}
        rest = Reading(REST, 1, {WHOLE: (self.rest, self.rest // 1000)})
        readings = (rest,) if self.unreadable else (rest, Reading(KEY, 1, counts))
        self.snapshot = Snapshot(at, readings, self.unreadable)
        self._books.settle(self.snapshot, at)


class Desk:
    """One node's books, two pods (the first with two addresses), and an audit of them."""

    def __init__(self, folder: Path, *links: PodLink, sandbox: str = "") -> None:
        file = folder / "netacct.yaml"
        file.write_text(json.dumps({"accounts_dir": str(folder / "accounts")}), encoding="utf-8")
        self.books = Books(Store(folder / "state", Place("boot", "netns")), config.load(str(file)), ["file"])
        pods = [Pod("team", "a", "uid-a"), Pod("team", "a", "uid-a"), Pod("team", "b", "uid-b")]
        at = clock.now()
        seen = tuple(Observation("file", ip, pod, sandbox, at, at) for ip, pod in zip(IPS, pods, strict=True))
        self.books.note(Replace("file", seen, at))
        self.counting = FakeCounting(self.books)
        self.counting.refresh()
        self.books.commit(self.counting.snapshot.at)
        self.links = FakeLinks(*links)
        self.ports: list[PortBytes] = []
        self.auditing = Auditing(self.books, self.links, lambda: self.ports)

    def look(self, times: int = 1) -> None:
        """A reading at which a comparison is due."""
        for _ in range(times):
            self.auditing.due = 0.0
            self.auditing.refresh(cast("Counting", self.counting))

    @property
    def blind_spots(self) -> list[str]:
        """The reasons that are shown."""
        return [reason for reason, shown in self.books.audit.blind_spots(clock.now()).items() if shown]

    @property
    def unclassified(self) -> dict[str, int]:
        """What was booked, by pod."""
        totals = self.books.ledger.totals.items()
        return {key.labels[1]: count.bytes for key, count in totals if key.traffic == UNCLASSIFIED and len(key[1]) == 2}


def link(number: int, *ips: Address) -> PodLink:
    """A link to these addresses."""
    return PodLink(number, frozenset(ips), unfiltered=False)


@pytest.mark.parametrize(
    ("links", "found"),
    [
        pytest.param([link(1, IPS[0], IPS[1])], {"a": 8 * MB}, id="two addresses"),
        pytest.param([link(1, IPS[0]), link(2, IPS[1])], {"a": 18 * MB}, id="two links"),
        pytest.param([link(1, IPS[0], IPS[2])], {}, id="shared"),
        pytest.param([link(1, IPS[0], IPS[2]), link(2, IPS[1])], {}, id="shared besides another"),
        pytest.param([link(1, IPS[0]), link(2, IPS[2])], {"a": 8 * MB, "b": 10 * MB}, id="two pods"),
        pytest.param([], {}, id="none"),
    ],
)
def test_a_pods_links_are_summed_and_shared_ones_left_out(
    tmp_path: Path, links: list[PodLink], found: dict[str, int]
) -> None:
    """All links of a pod against all that was counted for it; whose a shared link's bytes are, nobody knows."""
    desk = Desk(tmp_path, *links)
    desk.look()
    desk.links.sent, desk.counting.counted = 10 * MB, 2 * MB
    desk.look(2)
    assert desk.unclassified == found


def test_nothing_is_said_while_a_set_cannot_be_read(tmp_path: Path) -> None:
    """What an unreadable set counted is booked once it is repaired, so it is not missing."""
    desk = Desk(tmp_path, link(1, IPS[0]))
    desk.look()
    desk.links.sent, desk.counting.unreadable = 10 * MB, (KEY,)
    desk.look(3)
    assert desk.unclassified == {}
    desk.counting.counted, desk.counting.unreadable = 10 * MB, ()
    desk.look(3)
    assert desk.unclassified == {}
    assert desk.books.audit.coverage(clock.now()) == 1.0


def test_what_found_no_room_in_the_sets_is_not_booked_again(tmp_path: Path) -> None:
    """Bytes in a rest counter are unattributed already: while one grows, comparisons begin anew."""
    desk = Desk(tmp_path, link(1, IPS[0]))
    desk.look()
    desk.links.sent = desk.counting.rest = 10 * MB
    desk.look(3)
    assert desk.unclassified == {}
    desk.links.sent += 10 * MB
    desk.look(2)
    assert desk.unclassified == {"a": 10 * MB}


def test_looks_come_each_half_minute_and_after_a_doubt_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings between two looks cost nothing; a doubt, or leases that change, bring the next one near."""
    desk = Desk(tmp_path, link(1, IPS[0]))
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    desk.look()
    assert desk.auditing.due == now[0] + 30
    desk.links.refuses = True  # nobody asks
    desk.auditing.refresh(cast("Counting", desk.counting))
    assert desk.counting.collected["interfaces"].ok
    desk.links.refuses, desk.links.sent = False, 10 * MB
    now[0] += 30
    desk.auditing.refresh(cast("Counting", desk.counting))
    assert desk.auditing.due == now[0] + 1
    now[0] += 1
    desk.auditing.refresh(cast("Counting", desk.counting))
    assert desk.unclassified == {"a": 10 * MB}
    desk.auditing.soon()
    assert desk.auditing.due == now[0] + 1


@pytest.mark.parametrize(
    ("sandbox", "links", "shown"),
    [
        pytest.param("box", [link(1, IPS[0])], [NO_INTERFACE], id="a pod without"),
        pytest.param("box", [link(1, IPS[1]), link(2, IPS[2])], [], id="all with"),
        pytest.param("box", [link(1, *IPS)], [], id="a shared one"),
        pytest.param("", [], [], id="no pods of this node"),
    ],
)
def test_a_pod_without_an_interface_is_a_blind_spot_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str, links: list[PodLink], shown: list[str]
) -> None:
    """Nobody notices what a pod on SR-IOV or macvlan sends past netfilter: that is shown, unless the pod just began."""
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    desk = Desk(tmp_path, *links, sandbox=sandbox)
    desk.look()
    now[0] += 59
    desk.look()
    assert desk.blind_spots == []
    now[0] += 1
    desk.look()
    assert desk.blind_spots == shown
    desk.links.links = (link(1, IPS[0]), link(2, IPS[2]))
    now[0] += 301
    desk.look()
    assert desk.blind_spots == []


def test_rdma_is_a_blind_spot_while_adapters_move_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What adapters moved between two looks passed by everything; counters that rest or fall show nothing."""
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    desk = Desk(tmp_path)
    for moved, shown in ((700, []), (700, []), (600, []), (601, [RDMA]), (601, [RDMA])):
        desk.ports = [
            PortBytes("mlx5_0", "1", Direction.TRANSMIT, moved),
            PortBytes("efa_0", "1", Direction.RECEIVE, 5),
        ]
        desk.look()
        assert desk.blind_spots == shown
    now[0] += 301
    desk.look()
    assert desk.blind_spots == []


def test_interfaces_that_refuse_are_told(tmp_path: Path) -> None:
    """A look that fails costs no reading, and shows in the scrape."""
    desk = Desk(tmp_path, link(1, IPS[0]))
    desk.links.refuses = True
    desk.counting.counted = MB
    desk.look()
    assert not desk.counting.collected["interfaces"].ok
    assert desk.books.ledger.pending() or desk.books.ledger.totals


def test_without_interfaces_there_is_no_audit(tmp_path: Path) -> None:
    """Commands that need no audit have none: it is never due."""
    desk = Desk(tmp_path)
    none = Auditing(desk.books, None)
    none.soon(0)
    none.refresh(cast("Counting", desk.counting))
    assert none.due == float("inf")
    assert desk.books.audit.blind_spots(clock.now()) == {}


def test_the_audit_is_part_of_a_checkpoint() -> None:
    """What was compared and booked comes back from rows as it was; rows of a version without it have none."""
    one, two = (Pair(Count(n, n + 1), Count(n + 2, n + 3)) for n in (1, 1 << 60))
    state = {
        (7, Direction.TRANSMIT): Track("one", one, two, Count(5, 6), doubted=True),
        (7, Direction.RECEIVE): Track("two", two, one),
    }
    rows = dict(encode(Checkpoint(Ledger().state(), (), ExposureState({}), audit=state)))
    assert decode(rows).audit == state
    del rows["audit"], rows["audit/counts"]
    assert decode(rows).audit == {}
