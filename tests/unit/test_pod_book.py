"""Which events a watched source's pods make."""

from __future__ import annotations

from dataclasses import replace

from netacct.identity.kube_pod import KubePod
from netacct.identity.pod_book import PodBook
from netacct.identity.source import Replace, Update
from netacct.model import Observation, pack, unpack


def pod(name: str, *ips: str, phase: str = "Running", labels: dict[str, str] | None = None) -> KubePod:
    """A pod."""
    return KubePod("team-a", name, f"uid-{name}", phase, False, tuple(map(pack, ips)), ("", ""), labels or {}, None)


def words(event: Replace | Update | None) -> list[tuple[str, str, bool]]:
    """Pod, address and presence of each observation."""
    assert event is not None
    return [(seen.pod.name, unpack(seen.ip), seen.present) for seen in event.observations]


def test_the_first_list_is_news_even_if_it_is_empty() -> None:
    """A book that was never filled is not an empty one."""
    assert PodBook("test").fill([], 5.0) == Replace("test", (), 5.0)


def test_the_same_list_is_no_news() -> None:
    """Pods that have not changed are not told again."""
    book = PodBook("test")
    assert words(book.fill([pod("a", "10.0.0.1"), pod("b", "10.0.0.2", "fd00::2")], 5.0)) == [
        ("a", "10.0.0.1", True),
        ("b", "10.0.0.2", True),
        ("b", "fd00::2", True),
    ]
    assert book.fill([pod("b", "10.0.0.2", "fd00::2"), pod("a", "10.0.0.1")], 6.0) is None
    assert len(book) == 2


def test_an_incomplete_list_takes_nothing_back() -> None:
    """Where some pods could not be read, those of before are told with those that were."""
    book = PodBook("test")
    book.fill([pod("a", "10.0.0.1"), pod("b", "10.0.0.2")], 5.0)
    event = book.fill([pod("b", "10.0.0.3")], 6.0, complete=False)
    assert words(event) == [("a", "10.0.0.1", True), ("b", "10.0.0.3", True)]


def test_a_pod_that_changes() -> None:
    """An address that a pod no longer has is taken back with the new one's news; what stays the same is no news."""
    book = PodBook("test")
    assert book.put(pod("a"), 1.0) is None
    assert words(book.put(pod("a", "10.0.0.1", "fd00::1"), 2.0)) == [("a", "10.0.0.1", True), ("a", "fd00::1", True)]
    assert book.put(pod("a", "10.0.0.1", "fd00::1"), 3.0) is None
    event = book.put(pod("a", "10.0.0.9", "fd00::1"), 4.0)
    assert words(event) == [("a", "10.0.0.1", False), ("a", "10.0.0.9", True), ("a", "fd00::1", True)]
    assert event is not None
    assert {seen.seen_at for seen in event.observations} == {4.0}


def test_a_pod_that_completes_and_then_goes() -> None:
    """A pod that has ended owns nothing, and so there is nothing to take back when it is deleted."""
    book = PodBook("test")
    book.put(pod("a", "10.0.0.1"), 1.0)
    assert words(book.put(pod("a", "10.0.0.1", phase="Succeeded"), 2.0)) == [("a", "10.0.0.1", False)]
    assert book.drop("uid-a", 3.0) is None
    assert "uid-a" not in book


def test_a_pod_that_goes() -> None:
    """What is taken back is what was told, and only once."""
    book = PodBook("test", ["team"])
    told = book.put(pod("a", "10.0.0.1", labels={"team": "x", "other": "y"}), 1.0)
    gone = book.drop("uid-a", 2.0)
    assert told is not None
    assert gone is not None
    assert told.observations[0].pod.labels == (("team", "x"),)

    def timeless(seen: Observation) -> Observation:
        return replace(seen, seen_at=0.0, present=True)

    assert [timeless(seen) for seen in gone.observations] == [timeless(seen) for seen in told.observations]
    assert book.drop("uid-a", 3.0) is None
