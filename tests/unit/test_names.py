"""How a pod's owner and labels become known, whichever source tells them and however late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct.identity.leases import Close, LeaseBook, Open, Update
from netacct.identity.names import Names
from netacct.model import UNBOUNDED, Address, Observation, Pod, pack

IP, SECOND = pack("10.0.0.1"), pack("192.168.7.1")
BARE = Pod("team-a", "train-0", "uid-a")
LABELS = (("experiment", "x"),)
JOB = Pod("team-a", "train-0", "uid-a", "Job", "train", LABELS)
PRIORITY = ("file", "cni", "kubelet")


def cni(at: float, *, present: bool = True, ip: Address = IP, created: float = 9.0) -> Observation:
    """CNI speaks of the pod: it knows its sandbox, and neither owner nor labels."""
    return Observation("cni", ip, BARE, "box", created, at, present)


def kubelet(at: float, pod: Pod = JOB, *, present: bool = True, ip: Address = IP) -> Observation:
    """The kubelet speaks of the pod: it knows owner and labels, and no sandbox."""
    return Observation("kubelet", ip, pod, "", 8.0, at, present)


def book_of(*observations: Observation) -> LeaseBook:
    """A book after these observations, each committed when it was seen."""
    book = LeaseBook(PRIORITY)
    for seen in observations:
        book.observe([seen])
        book.commit(seen.seen_at)
    return book


def pods(book: LeaseBook) -> list[Pod]:
    """Whose leases the book remembers."""
    return [lease.pod for lease in book.state()]


def test_an_owner_is_filled_in_from_a_source_that_is_trusted_less() -> None:
    """CNI, which comes first, says nothing of owner and labels; so the kubelet's word on these counts."""
    book = book_of(cni(10.0))
    book.observe([kubelet(11.0)])
    (update,) = book.commit(11.5)
    assert isinstance(update, Update)
    assert (update.old.pod, update.lease.pod) == (BARE, JOB)


def test_an_owner_holds_for_addresses_that_its_source_does_not_know() -> None:
    """A second network's address, which only CNI sees, has the owner that was told with the first."""
    assert pods(book_of(cni(10.0, ip=SECOND), kubelet(11.0))) == [JOB, JOB]
    assert pods(book_of(kubelet(10.0), cni(11.0, ip=SECOND))) == [JOB, JOB]


def test_a_pod_that_has_ended_keeps_its_owner() -> None:
    """The kubelet's word that the pod has succeeded does not make its owner unknown while CNI still vouches."""
    book = book_of(cni(10.0), kubelet(11.0), kubelet(12.0, present=False))
    (lease,) = book.open_leases()
    assert (lease.pod, set(lease.sources)) == (JOB, {"cni"})


def test_the_first_word_on_a_pod_may_be_that_it_has_ended() -> None:
    """Of a pod that ended before the kubelet was asked, owner and labels are learnt all the same."""
    assert pods(book_of(cni(10.0), kubelet(11.0, present=False))) == [JOB]
    book = book_of(cni(10.0))
    book.replace("kubelet", [kubelet(11.0, present=False)], 11.0)
    book.commit(11.0)
    assert pods(book) == [JOB]


def test_a_closed_lease_gets_its_owner_late() -> None:
    """A Job of a second, gone before anybody told whose it was, is updated after its lease has closed."""
    book = book_of(cni(10.0), cni(11.0, present=False))
    (closed,) = book.state()
    book.observe([kubelet(12.0, present=False)])
    assert book.pending() == (Update(replace(closed, pod=JOB), closed),)
    assert book.commit(12.5) == (Update(replace(closed, pod=JOB), closed),)
    assert book.state() == (replace(closed, pod=JOB),)
    assert book.pending() == ()


def test_an_owner_told_with_the_end_comes_before_the_closing() -> None:
    """Where one commit learns of the owner and of the end, the lease is updated first and closes under its name."""
    book = book_of(cni(10.0))
    book.observe([cni(11.0, present=False), kubelet(11.0, present=False)])
    update, close = book.commit(11.5)
    assert isinstance(update, Update)
    assert isinstance(close, Close)
    assert (update.lease.pod, update.lease.closed, close.lease.pod, close.lease.closed) == (JOB, None, JOB, 11.0)
    assert book.open_leases() == ()


def test_a_brief_lease_has_the_owner_that_was_told_in_time() -> None:
    """A pod that came and went between two commits opens and closes under its owner."""
    book = LeaseBook(PRIORITY)
    book.observe([cni(10.0), cni(10.1, present=False), kubelet(10.2, present=False)])
    changes = book.commit(11.0)
    assert [type(change) for change in changes] == [Open, Close]
    assert {change.lease.pod for change in changes} == {JOB}


def test_an_owner_outlives_a_restart() -> None:
    """A book made of another one's leases knows their owners, also for what CNI alone goes on to say."""
    book = LeaseBook(PRIORITY, book_of(cni(10.0), kubelet(11.0)).state())
    book.replace("cni", [cni(20.0)], 20.0)
    book.replace("kubelet", [], 20.0)
    book.commit(20.0)
    assert pods(book) == [JOB]


def test_the_source_that_is_trusted_most_names_the_owner() -> None:
    """A pods file that gives owner or labels is believed before the kubelet; where it gives none, the kubelet is."""
    mine = Pod("team-a", "train-0", "uid-a", "Tenant", "mine", LABELS)
    filed = Observation("file", IP, mine, "", UNBOUNDED, 10.0)
    assert pods(book_of(filed, kubelet(11.0))) == pods(book_of(kubelet(10.0), filed)) == [mine]
    silent = Observation("file", IP, BARE, "", UNBOUNDED, 10.0)
    assert pods(book_of(silent, kubelet(11.0))) == [JOB]


def test_labels_may_change_while_the_pod_lives() -> None:
    """A label that the kubelet sees changed or removed is so from then on; an older word changes nothing."""
    other = replace(JOB, labels=(("experiment", "y"),))
    assert pods(book_of(cni(10.0), kubelet(11.0), kubelet(12.0, other))) == [other]
    assert pods(book_of(cni(10.0), kubelet(11.0), kubelet(12.0, replace(JOB, labels=())))) == [replace(JOB, labels=())]
    late = book_of(cni(10.0), kubelet(12.0, other))
    late.observe([kubelet(11.0)])
    late.commit(13.0)
    assert pods(late) == [other]


def test_names_of_the_forgotten_are_forgotten_now_and_then() -> None:
    """What was told of pods that no lease is remembered of goes away, so that memory is bounded."""
    names = Names()
    for number in range(1500):
        names.note(f"uid-{number}", 0, 1.0, JOB)
    assert names.has_excess(100)
    names.keep({"uid-7"})
    assert not names.has_excess(0)
    assert (names.fill("uid-7", BARE), names.fill("uid-8", BARE)) == (JOB, BARE)


def test_a_book_forgets_the_names_of_pods_that_never_had_a_lease() -> None:
    """A thousand ended pods that a list names, and that nobody ever saw alive, leave nothing behind."""
    book = LeaseBook(PRIORITY)
    ended = [kubelet(10.0, replace(JOB, uid=f"uid-{n}"), present=False) for n in range(1200)]
    book.replace("kubelet", ended, 10.0)
    book.observe([cni(11.0)])
    book.commit(11.0)
    book.observe([replace(cni(12.0, ip=SECOND), pod=replace(BARE, uid="uid-3"))])
    book.commit(12.0)
    assert [lease.pod.workload for lease in book.open_leases()] == ["", ""]


moves = st.lists(
    st.tuples(
        st.sampled_from(["cni", "kubelet"]),
        st.sampled_from([IP, SECOND]),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    ),
    max_size=25,
)


@pytest.mark.parametrize("lists", [False, True])
@given(drawn=moves)
def test_an_owner_that_was_known_stays_known(lists: bool, drawn: list[tuple[str, Address, int, bool, bool]]) -> None:
    """No commit makes an owner unknown, none but the first word on it changes it, and followers know all leases."""
    book = LeaseBook(PRIORITY)
    followed: dict[tuple[Address, float, str], Pod] = {}
    told: set[str] = set()
    for second, (source, ip, number, present, commits) in enumerate(drawn, 10):
        uid = f"uid-{number}"
        pod = replace(BARE if source == "cni" else JOB, uid=uid)
        told |= {uid} if source == "kubelet" else set()
        seen = Observation(source, ip, pod, "box" if source == "cni" else "", float(number), float(second), present)
        if lists and source == "kubelet":
            book.replace(source, [seen], float(second))
        else:
            book.observe([seen])
        if not commits:
            continue
        for change in book.commit(float(second)):
            key = (change.lease.ip, change.lease.opened, change.lease.pod.uid)
            if isinstance(change, Update):
                assert followed[key] == change.old.pod
                assert not change.old.pod.workload or change.lease.pod.workload
            followed[key] = change.lease.pod
        remembered = {(lease.ip, lease.opened, lease.pod.uid): lease.pod for lease in book.state()}
        assert remembered == {key: followed[key] for key in remembered}
        assert all(bool(lease.pod.workload) == (lease.pod.uid in told) for lease in book.state())
