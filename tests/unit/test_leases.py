"""The lease book's decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

from netacct.identity import kube_pod
from netacct.identity.leases import Close, LeaseBook, Open, Update, needs_reading
from netacct.model import UNBOUNDED, Address, Observation, Pod, pack

IP = pack("10.0.0.1")
A = Pod("team-a", "train-0", "uid-a")
B = Pod("team-b", "serve-0", "uid-b")


def seen(
    pod: Pod,
    at: float,
    *,
    created: float = UNBOUNDED,
    sandbox: str = "",
    source: str = "cri",
    present: bool = True,
    ip: Address = IP,
) -> Observation:
    """One word of one source."""
    return Observation(source, ip, pod, sandbox, created, at, present)


def gone(pod: Pod, at: float, *, sandbox: str = "", source: str = "cri") -> Observation:
    """One source says that the pod no longer holds the address."""
    return seen(pod, at, sandbox=sandbox, source=source, present=False)


def holder(book: LeaseBook) -> Pod | None:
    """Who holds the address."""
    lease = book.lease_of(IP)
    return lease.pod if lease else None


def told(book: LeaseBook, *observations: Observation) -> LeaseBook:
    """The book after these observations, each committed when it was seen."""
    for observation in observations:
        book.observe([observation])
        book.commit(observation.seen_at)
    return book


def test_observing_changes_nothing_before_the_commit() -> None:
    """There is time for a reading between learning of a change and making it."""
    book = LeaseBook()
    book.observe([seen(A, 10.0, created=9.0)])
    (pending,) = book.pending()
    assert isinstance(pending, Open)
    assert book.open_leases() == ()
    assert needs_reading(book.pending())
    (opened,) = book.commit(11.0)
    assert book.open_leases() == (opened.lease,)
    assert (opened.lease.created, opened.lease.opened) == (9.0, 11.0)
    assert book.pending() == ()


def test_gone_closes_at_the_commit_and_as_of_when_the_source_saw_it() -> None:
    """The lease lasts until its counters were read; it says when the pod was seen to have left."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0))
    book.observe([gone(A, 20.0)])
    assert holder(book) == A
    (closed,) = book.commit(20.5)
    assert isinstance(closed, Close)
    assert closed.lease.closed == 20.0
    assert book.closed_since(20.0) == (closed.lease,)
    assert book.closed_since(20.1) == ()
    assert holder(book) is None


def test_the_newest_sandbox_wins_in_either_order() -> None:
    """An address goes to the sandbox made last, whichever is seen first."""
    older, newer = seen(A, 11.0, created=5.0), seen(B, 10.0, created=8.0)
    assert holder(told(LeaseBook(), older, newer)) == B
    assert holder(told(LeaseBook(), newer, older)) == B


def test_a_takeover_closes_the_old_lease_before_it_opens_the_new() -> None:
    """Both happen in one commit, at the same moment."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0))
    book.observe([seen(B, 20.0, created=19.0)])
    closed, opened = book.commit(21.0)
    assert isinstance(closed, Close)
    assert isinstance(opened, Open)
    assert closed.lease.pod == A
    assert closed.lease.closed == opened.lease.opened == 21.0


def test_a_late_gone_of_an_old_pod_does_not_release_the_new_one() -> None:
    """Only the owner releases."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0), seen(B, 20.0, created=19.0), gone(A, 25.0))
    assert holder(book) == B


def test_the_gone_of_an_old_sandbox_does_not_release_the_new_one_of_the_same_pod() -> None:
    """A pod whose sandbox was made anew keeps its address when the old sandbox is torn down."""
    book = told(
        LeaseBook(),
        seen(A, 10.0, created=9.0, sandbox="one"),
        seen(A, 20.0, created=19.0, sandbox="two"),
        gone(A, 25.0, sandbox="one"),
    )
    lease = book.lease_of(IP)
    assert lease is not None
    assert lease.sandbox == "two"


def test_doubled_events_change_nothing() -> None:
    """The same word twice, either way, is one word."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0))
    book.observe([seen(A, 10.0, created=9.0)])
    assert book.pending() == ()
    told(book, gone(A, 20.0))
    book.observe([gone(A, 20.0), gone(A, 20.0)])
    assert book.pending() == ()


def test_an_old_present_after_a_newer_gone_is_ignored() -> None:
    """Events that overtook each other do not resurrect a pod."""
    assert holder(told(LeaseBook(), gone(A, 20.0), seen(A, 15.0, created=9.0))) is None


def test_an_old_gone_after_a_newer_present_is_ignored() -> None:
    """Nor do they bury a living one."""
    assert holder(told(LeaseBook(), seen(A, 20.0, created=9.0), gone(A, 15.0))) == A


def test_a_lease_lasts_while_one_source_vouches_for_it() -> None:
    """The word of one source ends nothing that another still sees."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0), seen(A, 11.0, created=8.0, source="apiserver"))
    assert holder(told(book, gone(A, 20.0))) == A
    assert holder(told(book, gone(A, 21.0, source="apiserver"))) is None


def test_gone_by_a_source_that_never_vouched_releases_nothing() -> None:
    """A source can take back only its own word."""
    assert holder(told(LeaseBook(), seen(A, 10.0, created=9.0), gone(A, 20.0, source="other"))) == A


def test_a_pod_that_lost_its_address_does_not_get_it_back() -> None:
    """When the newer pod leaves, a lagging source does not bring the older one back, also after a restart."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0, source="apiserver"), seen(B, 20.0, created=19.0), gone(B, 30.0))
    assert holder(book) is None
    assert holder(told(book, seen(A, 31.0, created=9.0, source="apiserver"))) is None
    again = LeaseBook(leases=book.state())
    assert holder(told(again, seen(A, 32.0, created=9.0, source="apiserver"))) is None


def test_a_tenant_of_unknown_age_gets_its_address_back() -> None:
    """What a file lists holds again once a pod that had taken the address has left."""
    book = told(LeaseBook(), seen(A, 10.0, source="file"), seen(B, 20.0, created=19.0))
    assert holder(book) == B
    assert holder(told(book, gone(B, 30.0))) == A


def test_between_two_of_unknown_age_the_holder_stays_until_released() -> None:
    """The second tenant of one address waits for the first one's release."""
    book = told(LeaseBook(), seen(A, 10.0), seen(B, 20.0))
    assert holder(book) == A
    assert holder(told(book, gone(A, 30.0))) == B


def test_a_full_list_releases_what_is_missing_of_its_own_source_only() -> None:
    """A list takes back its source's word for everything that it does not name."""
    other = pack("10.0.0.2")
    book = told(LeaseBook(), seen(A, 10.0, created=9.0), seen(B, 10.0, created=9.0, source="file", ip=other))
    book.replace("cri", [seen(B, 20.0, created=19.0)], 20.0)
    book.commit(20.0)
    assert holder(book) == B
    assert book.lease_of(other) is not None
    book.replace("file", [], 30.0)
    book.commit(30.0)
    assert book.lease_of(other) is None


def test_a_list_that_repeats_what_is_known_changes_nothing() -> None:
    """Listing again costs no reading."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0, sandbox="one"))
    book.replace("cri", [seen(A, 20.0, created=9.0, sandbox="one")], 20.0)
    assert book.pending() == ()


def test_a_list_can_hand_an_address_from_one_tenant_to_the_next() -> None:
    """An edited file that names another tenant for the address moves it, though both are of unknown age."""
    book = told(LeaseBook(), seen(A, 10.0, source="file"))
    book.replace("file", [seen(B, 20.0, source="file")], 20.0)
    book.commit(20.0)
    assert holder(book) == B


def test_a_pod_that_came_and_went_between_two_commits_has_a_brief_lease() -> None:
    """Its bytes are in the kernel, so it opens and closes in one commit."""
    book = LeaseBook()
    book.observe([seen(A, 10.0, created=9.0), gone(A, 11.0)])
    opened, closed = book.commit(12.0)
    assert isinstance(opened, Open)
    assert isinstance(closed, Close)
    assert (closed.lease.pod, closed.lease.created, closed.lease.opened, closed.lease.closed) == (A, 9.0, 11.0, 11.0)
    assert holder(book) is None
    assert book.leases_since(11.0) == (closed.lease,)


def test_a_brief_takeover_ends_the_older_lease_too() -> None:
    """Who lost the address to a brief pod does not hold it afterwards."""
    book = told(LeaseBook(), seen(A, 5.0, created=4.0))
    book.observe([seen(B, 10.0, created=9.0), gone(B, 11.0)])
    changes = book.commit(12.0)
    assert [(type(change), change.lease.pod) for change in changes] == [(Close, A), (Open, B), (Close, B)]
    assert holder(book) is None
    assert holder(told(book, seen(A, 13.0, created=4.0))) is None


def test_a_pod_that_flickers_between_two_commits_has_one_lease() -> None:
    """Gone and present again before anybody looked is simply present."""
    book = LeaseBook()
    book.observe([seen(A, 10.0, created=9.0), gone(A, 11.0), seen(A, 12.0, created=9.0)])
    (opened,) = book.commit(12.0)
    assert isinstance(opened, Open)
    assert holder(book) == A


def test_a_source_without_sandbox_ids_speaks_of_the_same_lease() -> None:
    """The API server's pod and the runtime's sandbox are one lease, created when the sandbox was."""
    book = told(LeaseBook(), seen(A, 10.0, created=7.0, source="apiserver"))
    book.observe([seen(A, 11.0, created=9.0, sandbox="one")])
    (update,) = book.commit(11.0)
    assert isinstance(update, Update)
    assert (update.lease.sandbox, update.lease.created, update.lease.opened) == ("one", 9.0, 10.0)
    assert update.lease.sources == {"apiserver", "cri"}


def test_labels_come_from_the_source_that_is_believed_most_and_ask_for_a_reading() -> None:
    """Priority decides who describes a pod; bytes from then on may go to another label's series."""
    labelled = Pod("team-a", "train-0", "uid-a", labels=(("experiment", "x"),))
    book = told(LeaseBook(["apiserver", "cri"]), seen(A, 10.0, created=9.0))
    book.observe([seen(labelled, 11.0, created=9.0, source="apiserver")])
    assert needs_reading(book.pending())
    book.commit(11.0)
    assert holder(told(book, seen(A, 12.0, created=9.0))) == labelled


def test_a_new_workload_asks_for_a_reading_first() -> None:
    """An update that sends bytes to other series is a change like an opening."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0))
    book.observe([seen(Pod("team-a", "train-0", "uid-a", "Job", "train"), 11.0, created=9.0)])
    assert needs_reading(book.pending())


def test_tenants_without_uids_are_told_apart_by_name() -> None:
    """Two entries of a file without uids are two tenants."""
    first, second = Pod("vm", "one", ""), Pod("vm", "two", "")
    assert holder(told(LeaseBook(), seen(first, 10.0), gone(second, 11.0))) == first


def test_closed_leases_are_forgotten_in_time() -> None:
    """Leases of the past do not pile up, nor do withdrawn words."""
    book = LeaseBook(keep=100.0)
    for number in range(50):
        pod = Pod("team-a", f"job-{number}", f"uid-{number}")
        told(book, seen(pod, number * 10.0, created=number * 10.0), gone(pod, number * 10.0 + 5))
    assert len(book.closed_since(0.0)) <= 11
    assert len(book._withdrawn) <= 11


def test_a_restored_book_keeps_its_leases_until_their_sources_speak() -> None:
    """After a restart nothing closes by silence, and a first list releases what is gone."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0))
    again = LeaseBook(leases=book.state())
    assert again.open_leases() == book.open_leases()
    assert again.pending() == ()
    again.replace("cri", [], 50.0)
    again.commit(50.0)
    assert holder(again) is None


def test_a_lease_ends_no_later_than_its_heirs_sandbox_was_made() -> None:
    """Where nobody said that the old pod left, its heir's sandbox says so; the heir's pod may have started before."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0, sandbox="a"))
    book.observe([seen(B, 20.0, created=15.0, sandbox="b")])
    closed, opened = book.commit(21.0)
    assert (closed.lease.closed, opened.lease.opened) == (15.0, 21.0)
    book = told(LeaseBook(), seen(A, 10.0, created=9.0, sandbox="a"))
    book.observe([seen(B, 20.0, created=15.0)])
    assert book.commit(21.0)[0].lease.closed == 21.0


def test_a_lease_ends_when_its_last_source_saw_the_pod_leave() -> None:
    """A source that took its word back earlier does not end it, and an end is never before the lease began."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0), seen(A, 11.0, created=8.0, source="apiserver"))
    book.observe([gone(A, 20.0), gone(A, 25.0, source="apiserver")])
    assert book.commit(30.0)[0].lease.closed == 25.0
    book = LeaseBook()
    book.observe([seen(A, 10.0, created=9.0)])
    book.commit(12.0)
    book.observe([gone(A, 11.0)])
    assert book.commit(13.0)[0].lease.closed == 12.0


def test_an_end_that_overtook_its_begin_leaves_a_brief_lease() -> None:
    """A pod's bytes are in the kernel, in whatever order its begin and end are heard of."""
    book = LeaseBook()
    book.observe([gone(A, 11.0, sandbox="a"), seen(A, 10.0, created=9.0, sandbox="a")])
    opened, closed = book.commit(12.0)
    assert (opened.lease.pod, closed.lease.pod, closed.lease.closed) == (A, A, 11.0)
    assert holder(book) is None


def test_who_is_older_than_a_pod_that_left_does_not_get_its_address() -> None:
    """A file that a failed DEL left behind, read after its heir came and went, names nobody who could be there."""
    book = told(LeaseBook(), seen(B, 20.0, created=19.0, sandbox="b"), gone(B, 30.0, sandbox="b"))
    assert holder(told(book, seen(A, 31.0, created=9.0, sandbox="a"))) is None


def test_a_dead_sandbox_that_the_kubelet_still_lists_loses_its_address_for_good() -> None:
    """A Running pod whose sandbox died is no holder once another pod had its address, whoever was heard of first."""
    listed = seen(A, 12.0, created=5.0, source="kubelet")
    reused = [seen(B, 20.0, created=19.0, sandbox="b"), gone(B, 30.0, sandbox="b")]
    assert holder(told(LeaseBook(), listed, *reused)) is None
    assert holder(told(LeaseBook(), reused[0], listed, reused[1])) is None
    assert holder(told(LeaseBook(), *reused, listed)) is None


def test_a_pod_that_waited_for_its_sandbox_gets_the_address_of_one_that_left() -> None:
    """Started before another pod's sandbox was made, and seen with the address only after: that is its heir."""
    book = told(LeaseBook(), seen(B, 20.0, created=19.0, sandbox="b"), gone(B, 30.0, sandbox="b"))
    assert holder(told(book, seen(A, 31.0, created=5.0, source="kubelet"))) == A


def test_a_pod_that_ended_takes_nothing_from_the_heir_of_its_address() -> None:
    """Succeeded pods keep their address in the API: what lists them as gone, ever again, is no word on their heirs."""
    book = told(LeaseBook(), seen(A, 10.0, created=9.0), seen(B, 20.0, created=19.0), gone(A, 25.0, source="kubelet"))
    assert holder(book) == B
    book.replace("kubelet", [gone(A, 30.0, source="kubelet")], 30.0)
    assert book.pending() == ()


def test_a_sandbox_keeps_its_age_when_the_source_that_knew_it_is_gone() -> None:
    """What remains is the word of a source that knows the pod's start only, and the sandbox is no older for that."""
    book = told(
        LeaseBook(),
        seen(B, 12.0, created=11.0, sandbox="b"),
        gone(B, 14.0, sandbox="b"),
        seen(A, 16.0, created=15.0, sandbox="a"),
        seen(A, 17.0, created=8.0, source="kubelet"),
        gone(A, 20.0, sandbox="a"),
    )
    lease = book.lease_of(IP)
    assert lease is not None
    assert (lease.pod, lease.created, set(lease.sources)) == (A, 15.0, {"kubelet"})


def test_of_a_pod_with_two_sandboxes_each_holds_its_own_address() -> None:
    """A sandbox that was made anew has another address; the kubelet's old word keeps the dead one until it knows."""
    other = pack("10.0.0.2")
    book = told(
        LeaseBook(),
        seen(A, 10.0, created=9.0, sandbox="one"),
        seen(A, 11.0, created=8.0, source="kubelet"),
        gone(A, 20.0, sandbox="one"),
        seen(A, 21.0, created=20.5, sandbox="two", ip=other),
    )
    assert {lease.sandbox for lease in book.open_leases()} == {"one", "two"}
    assert holder(told(book, seen(B, 22.0, created=21.5, sandbox="b"))) == B
    book.replace("kubelet", [seen(A, 30.0, created=8.0, source="kubelet", ip=other)], 30.0)
    book.commit(30.0)
    assert {(lease.pod.name, lease.sandbox) for lease in book.open_leases()} == {("serve-0", "b"), ("train-0", "two")}


def test_who_came_and_went_twice_between_two_commits_has_one_brief_lease() -> None:
    """Until the last time that it left; and who holds the address in the end was not brief."""
    book = LeaseBook()
    twice = [seen(A, 10.0, created=9.0), gone(A, 11.0), seen(A, 12.0, created=9.0), gone(A, 13.0)]
    book.observe(twice)
    opened, closed = book.commit(14.0)
    assert (opened.lease.pod, closed.lease.closed) == (A, 13.0)


def test_a_brief_lease_is_not_forgotten_over_a_late_word() -> None:
    """A source that lists a pod whose address another has had since takes nothing from its brief lease."""
    book = LeaseBook()
    book.observe([seen(A, 10.0, created=9.0, sandbox="a"), gone(A, 11.0, sandbox="a")])
    book.observe([seen(B, 13.0, created=12.0, sandbox="b"), gone(B, 14.0, sandbox="b")])
    book.observe([seen(A, 10.5, created=8.0, source="kubelet")])
    assert [(change.lease.pod, change.lease.closed) for change in book.commit(15.0) if isinstance(change, Close)] == [
        (A, 11.0),
        (B, 14.0),
    ]
    assert holder(book) is None


def test_a_tenant_of_unknown_age_holds_its_address_through_a_brief_pod() -> None:
    """A pod that came and went between two commits has its lease, and the tenant that a file lists keeps its own."""
    book = told(LeaseBook(), seen(A, 10.0, source="file"))
    book.observe([seen(B, 20.0, created=19.0, sandbox="b"), gone(B, 21.0, sandbox="b")])
    assert [type(change) for change in book.commit(22.0)] == [Open, Close]
    assert holder(book) == A


def test_a_static_pod_is_one_whether_the_runtime_or_the_api_server_tells_of_it() -> None:
    """The mirror of a static pod names the uid that the runtime knows, the hash of its manifest: both words join."""
    mirror = kube_pod.from_json(
        {
            "metadata": {
                "namespace": "kube-system",
                "name": "proxy-node-1",
                "uid": "of-the-copy",
                "annotations": {kube_pod.MIRROR: "d41d8cd9"},
            },
            "status": {"phase": "Pending", "podIPs": [{"ip": "10.0.0.1"}]},
        }
    )
    assert mirror is not None
    own = Pod("kube-system", "proxy-node-1", "d41d8cd9")
    book = told(LeaseBook(), seen(own, 10.0, created=9.0, sandbox="a", source="cni"))
    book.replace("apiserver", kube_pod.observations("apiserver", [mirror], 11.0), 11.0)
    book.commit(11.0)
    (lease,) = book.open_leases()
    assert (lease.pod.uid, lease.sandbox, set(lease.sources)) == ("d41d8cd9", "a", {"cni", "apiserver"})


def test_sources_can_be_trusted_in_another_order_later() -> None:
    """After a reload that turned the order round, what the other source says next is believed."""
    one, other = replace(A, workload_kind="Job", workload="one"), replace(A, workload_kind="Job", workload="other")
    book = told(LeaseBook(("file", "cri")), seen(one, 10.0, source="file"), seen(other, 11.0, source="cri"))
    assert holder(book) == one
    book.prefer(("cri", "file"))
    told(book, seen(other, 12.0, source="cri"))
    assert holder(book) == other
