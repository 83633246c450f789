"""The laws of the lease book, over all kinds of histories."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from netacct.identity.leases import Close, LeaseBook, Open
from netacct.model import UNBOUNDED, Lease, Observation, Pod

IPS = [b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x02"]
PODS = [Pod("team", f"pod-{n}", f"uid-{n}") for n in range(4)]
CREATED = [UNBOUNDED, 1.0, 2.0, 3.0]
"""The age of each pod's sandbox."""

words = st.lists(
    st.tuples(st.sampled_from(["cni", "api"]), st.sampled_from(IPS), st.integers(0, 3), st.booleans(), st.booleans()),
    min_size=4,
    max_size=30,
)


def observations(drawn: list[tuple[str, bytes, int, bool, bool]]) -> list[Observation]:
    """Observations, each seen a second after the one before."""
    return [
        Observation(source, ip, PODS[pod], f"box-{pod}", CREATED[pod], 10.0 + second, present)
        for second, (source, ip, pod, present, _) in enumerate(drawn)
    ]


def vouched(seen: list[Observation]) -> set[tuple[bytes, str]]:
    """Which (address, uid) some source's last word names."""
    last = {(word.source, word.ip, word.pod.uid): word.present for word in sorted(seen, key=lambda w: w.seen_at)}
    return {(ip, uid) for (_, ip, uid), present in last.items() if present}


def as_set(leases: tuple[Lease, ...]) -> set[tuple[bytes, str]]:
    """Address and uid of each lease."""
    return {(lease.ip, lease.pod.uid) for lease in leases}


@given(words, st.randoms())
def test_the_order_of_arrival_does_not_matter(drawn: list[tuple[str, bytes, int, bool, bool]], random: object) -> None:
    """However the events of one batch are shuffled, the newest sandbox of known age has each address, until it left."""
    seen = [word for word in observations(drawn) if word.created != UNBOUNDED]
    shuffled = list(seen)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' random.Random
    book = LeaseBook()
    book.observe(shuffled)
    book.commit(100.0)
    newest = {
        word.ip: max(other.pod.uid for other in seen if other.present and other.ip == word.ip)
        for word in seen
        if word.present
    }
    assert as_set(book.open_leases()) == set(newest.items()) & vouched(seen)


@given(words)
def test_leases_are_vouched_for_and_never_older_than_a_standing_claim(
    drawn: list[tuple[str, bytes, int, bool, bool]],
) -> None:
    """At every commit each holder is in some source's last word; who stands by is older than one that held before."""
    book = LeaseBook()
    told: list[Observation] = []
    held: set[tuple[bytes, str]] = set()
    for word, (*_, commits) in zip(observations(drawn), drawn, strict=True):
        book.observe([word])
        told.append(word)
        if commits:
            book.commit(word.seen_at)
            standing = vouched(told)
            assert as_set(book.open_leases()) <= standing
            assert all(count == 1 for count in Counter(lease.ip for lease in book.open_leases()).values())
            held |= as_set(book.open_leases()) | as_set(book.closed_since(0.0))
            for ip, uid in standing - held:
                assert any(where == ip and CREATED[int(holder[-1])] >= CREATED[int(uid[-1])] for where, holder in held)


@given(words)
def test_changes_add_up_to_the_leases(drawn: list[tuple[str, bytes, int, bool, bool]]) -> None:
    """Whoever follows the committed changes knows the open leases, and a restored book has the same."""
    book = LeaseBook()
    followed: dict[tuple[bytes, str], Lease] = {}
    for word, (*_, commits) in zip(observations(drawn), drawn, strict=True):
        book.observe([word])
        if not commits:
            continue
        announced = [(type(change), change.lease.ip, change.lease.pod) for change in book.pending()]
        changes = book.commit(word.seen_at)
        assert announced == [(type(change), change.lease.ip, change.lease.pod) for change in changes]
        for change in changes:
            key = (change.lease.ip, change.lease.pod.uid)
            if isinstance(change, Close):
                followed.pop(key)
            else:
                assert isinstance(change, Open) == (key not in followed)
                followed[key] = change.lease
        assert set(followed.values()) == set(book.open_leases())
        assert set(LeaseBook(leases=book.state()).state()) == set(book.state())
