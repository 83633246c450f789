"""Two sources of different lateness about one address: whatever order their words come in, the end is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.identity.leases import LeaseBook
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.model import Observation, Pod

IP = b"\x0a\x00\x00\x01"
PODS = [Pod("team", f"pod-{number}", f"uid-{number}") for number in range(4)]
STARTED = [1.5, 12.5, 3.5, 30.5]
"""When the kubelet says that each pod started: before its sandbox, but perhaps while another had the address."""


@dataclass(frozen=True)
class Tenure:
    """What is true: this pod's sandbox had the address from `begin` to `end`."""

    pod: int
    sandbox: str
    begin: float
    end: float


def history(drawn: list[tuple[int, int, int]]) -> list[Tenure]:
    """Tenures one after the other, each of a pod that has started by then, with a sandbox of its own."""
    found: list[Tenure] = []
    now = 2.0
    for number, (pod, gap, length) in enumerate(drawn):
        begin = max(now + gap, STARTED[pod] + 0.5)
        found.append(Tenure(pod, f"box-{number}", begin, begin + length))
        now = begin + length + 1
    return found


def by_cni(tenures: list[Tenure], lives: bool) -> Iterator[SourceEvent]:
    """What CNI tells, each at once; the last sandbox may live on."""
    for number, tenure in enumerate(tenures):
        ends = not lives or number < len(tenures) - 1
        for at, present in ((tenure.begin, True), (tenure.end, False)) if ends else ((tenure.begin, True),):
            seen = Observation("cni", IP, PODS[tenure.pod], tenure.sandbox, tenure.begin, at, present)
            yield Update("cni", (seen,))


def by_kubelet(tenures: list[Tenure], lives: bool, polls: list[tuple[int, int]]) -> Iterator[SourceEvent]:
    """What somebody answers who is asked now and then, and learns of everything late by some seconds."""
    at = 0.0
    for pause, lag in polls:
        at += pause
        last = tenures[-1]
        seen = [
            Observation("kubelet", IP, PODS[tenure.pod], "", STARTED[tenure.pod], at + 0.25)
            for tenure in tenures
            if tenure.begin <= at - lag and (at - lag < tenure.end or (lives and tenure is last))
        ]
        yield Replace("kubelet", tuple(seen), at + 0.25)


def merged(several: list[list[SourceEvent]], random: Random) -> Iterator[SourceEvent]:
    """The events of several sources in some order, each source's in its own."""
    several = [list(events) for events in several]
    while any(several):
        yield random.choice([events for events in several if events]).pop(0)


def told(events: Iterator[SourceEvent], random: Random) -> LeaseBook:
    """A book that was told all this, with commits now and then."""
    book = LeaseBook(["kubelet", "cni"])
    at = 100.0
    for event in events:
        if isinstance(event, Replace):
            book.replace(event.source, event.observations, event.seen_at)
        else:
            book.observe(event.observations)
        at += 1.0
        if random.random() < 0.7:
            book.commit(at)
    book.commit(at + 1)
    return book


def holder(book: LeaseBook) -> str | None:
    """Whose the address is in the end."""
    lease = book.lease_of(IP)
    return lease.pod.uid if lease else None


drawn_tenures = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=5)
drawn_polls = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), max_size=8)


@settings(max_examples=500, deadline=None)
@given(drawn_tenures, st.booleans(), drawn_polls, st.randoms(use_true_random=False))
def test_the_end_does_not_depend_on_who_is_heard_first(
    drawn: list[tuple[int, int, int]], lives: bool, polls: list[tuple[int, int]], random: Random
) -> None:
    """However two sources interleave, who lives has the address, else nobody but whom the late source still repeats.

    (A late source may keep a dead one, which sends nothing.)
    """
    tenures = history([each for number, each in enumerate(drawn) if each[0] not in {pod for pod, *_ in drawn[:number]}])
    answers = list(by_kubelet(tenures, lives, polls))
    end = holder(told(merged([list(by_cni(tenures, lives)), list(answers)], random), random))
    if lives:
        assert end == PODS[tenures[-1].pod].uid
    else:
        assert end is None or end in {seen.pod.uid for answer in answers[-1:] for seen in answer.observations}


@settings(max_examples=500, deadline=None)
@given(drawn_tenures, st.booleans(), drawn_polls, st.randoms(use_true_random=False))
def test_in_the_end_the_address_is_who_has_it(
    drawn: list[tuple[int, int, int]], lives: bool, polls: list[tuple[int, int]], random: Random
) -> None:
    """Once the late source has caught up, the holder is the pod whose sandbox lives, or nobody."""
    tenures = history(drawn)
    end = sum(pause for pause, _ in polls)
    caught_up = [*polls, (max(1, int(tenures[-1].end) - end + 1), 0)]
    book = told(merged([list(by_cni(tenures, lives)), list(by_kubelet(tenures, lives, caught_up))], random), random)
    assert holder(book) == (PODS[tenures[-1].pod].uid if lives else None)
