"""What becomes of the bytes of pods whose workload or label nobody has told yet, and the series of labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from netacct import config
from netacct.accounting.accounts_read import read_files
from netacct.accounting.encoding import Checkpoint, decode, encode
from netacct.accounting.exposure import Exposure, ExposureState
from netacct.accounting.ledger import Ledger
from netacct.accounting.series import OTHER, Limits, names_of
from netacct.accounting.store import Place, Store
from netacct.books import Books
from netacct.identity.source import Update
from netacct.model import (
    Address,
    Count,
    CounterKey,
    Direction,
    Lease,
    Level,
    Observation,
    Pod,
    Reading,
    Scope,
    SeriesKey,
    Snapshot,
    pack,
)

IP, SIX = pack("10.0.0.1"), pack("fd00::1")
IN = CounterKey(4, Scope.POD, Direction.RECEIVE, "internet")
IN6 = CounterKey(6, Scope.POD, Direction.RECEIVE, "internet")
BARE = Pod("team-a", "train-0", "uid-a")
JOB = Pod("team-a", "train-0", "uid-a", "Job", "train", (("experiment", "x"),))
BY = Limits(by_label="experiment")


def one(at: float, octets: int, ip: Address = IP) -> Snapshot:
    """A reading of one counter."""
    return Snapshot(at, (Reading(IN if ip == IP else IN6, 7, {ip: (octets, 1)}),))


def begun(limits: Limits = BY) -> Ledger:
    """A ledger that began at 0."""
    ledger = Ledger(limits=limits)
    ledger.baseline(one(10.0, 0), 10.0)
    ledger.baseline(one(10.0, 0, SIX), 10.0)
    return ledger


def lease(pod: Pod, ip: Address = IP, closed: float | None = None) -> Lease:
    """A lease of the address."""
    return Lease(ip, pod, "box", 9.0, 11.0, closed)


def total(ledger: Ledger, level: Level, *labels: str) -> int:
    """The bytes of one series."""
    return ledger.totals.get(SeriesKey(level, labels, *IN[2:]), Count(0, 0)).bytes


def of(ledger: Ledger, level: Level) -> dict[tuple[str, ...], int]:
    """The bytes of a level, by name."""
    return {key.labels: count.bytes for key, count in ledger.totals.items() if key.level is level}


@pytest.mark.parametrize(
    ("pod", "value"),
    [
        (BARE, None),
        (JOB, "x"),
        (replace(JOB, labels=()), ""),
        (replace(BARE, labels=(("experiment", "x"),)), "x"),
        (replace(BARE, labels=(("team", "a"),)), ""),
    ],
)
def test_a_label_is_known_when_owner_or_labels_are(pod: Pod, value: str | None) -> None:
    """A pod without the label counts under the empty value, once anybody who would know it has spoken."""
    expected = [] if value is None else [(Level.LABEL, ("team-a", value))]
    assert [name for name in names_of(pod, "experiment") if name[0] is Level.LABEL] == expected
    assert [name for name in names_of(pod) if name[0] is Level.LABEL] == []


def test_a_late_owner_is_credited_with_all_of_the_lease() -> None:
    """What came before the owner was told is the workload's and the label's, too, once it is told; nothing is twice."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(BARE)], 20.0)
    assert of(ledger, Level.WORKLOAD) == of(ledger, Level.LABEL) == {}
    ledger.saved()
    ledger.name(lease(BARE), lease(JOB), 20.0)
    assert ledger.must_save
    ledger.settle(one(30.0, 130), [lease(JOB)], 30.0)
    assert of(ledger, Level.WORKLOAD) == {("team-a", "Job", "train"): 130}
    assert of(ledger, Level.LABEL) == {("team-a", "x"): 130}
    assert of(ledger, Level.NAMESPACE) == {("team-a",): 130}
    assert of(ledger, Level.POD) == {("team-a", "train-0"): 130}


def test_each_address_of_a_pod_is_credited_by_itself() -> None:
    """Of a dual-stack pod, each lease brings its own bytes to the workload, whichever is told first."""
    ledger = begun()
    both = Snapshot(20.0, one(20.0, 100).readings + one(20.0, 7, SIX).readings)
    ledger.settle(both, [lease(BARE), lease(BARE, SIX)], 20.0)
    ledger.name(lease(BARE, SIX), lease(JOB, SIX), 20.0)
    assert total(ledger, Level.WORKLOAD, "team-a", "Job", "train") == 7
    ledger.name(lease(BARE), lease(JOB), 20.0)
    assert total(ledger, Level.WORKLOAD, "team-a", "Job", "train") == 107


def test_from_one_known_name_to_another_nothing_moves() -> None:
    """A label that changes, and a workload that does, count from then on; the old series keep what they have."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(JOB)], 20.0)
    other = Pod("team-a", "train-0", "uid-a", "Job", "other", (("experiment", "y"),))
    ledger.name(lease(JOB), lease(other), 20.0)
    ledger.settle(one(30.0, 130), [lease(other)], 30.0)
    assert of(ledger, Level.WORKLOAD) == {("team-a", "Job", "train"): 100, ("team-a", "Job", "other"): 30}
    assert of(ledger, Level.LABEL) == {("team-a", "x"): 100, ("team-a", "y"): 30}


def test_a_tenant_that_moves_as_it_is_named_takes_nothing_along() -> None:
    """What a lease got in another namespace is not credited to a workload of this one."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(BARE)], 20.0)
    ledger.name(lease(BARE), lease(replace(JOB, namespace="team-b")), 20.0)
    assert of(ledger, Level.WORKLOAD) == {}


def test_a_late_owner_in_a_full_level_is_credited_to_other() -> None:
    """Where the level has no room for the workload or the value, `__other__` of the namespace gets its bytes."""
    ledger = begun(Limits(workloads=1, labels=1, by_label="experiment"))
    first = replace(JOB, name="first-0", uid="uid-b", workload="first", labels=(("experiment", "first"),))
    both = Snapshot(20.0, one(20.0, 100).readings + one(20.0, 7, SIX).readings)
    ledger.settle(both, [lease(BARE), lease(first, SIX)], 20.0)
    ledger.name(lease(BARE), lease(JOB), 20.0)
    assert of(ledger, Level.WORKLOAD) == {("team-a", "Job", "first"): 7, ("team-a", OTHER, OTHER): 100}
    assert of(ledger, Level.LABEL) == {("team-a", "first"): 7, ("team-a", OTHER): 100}
    assert ledger.capped == 2


def test_a_late_owner_revives_no_pod_series() -> None:
    """The owner of a pod whose series has ended is credited, and `netacct_pod_info` does not come back."""
    ledger = begun(Limits(pod_retention=1.0))
    ledger.settle(one(20.0, 100), [lease(BARE, closed=20.0)], 20.0)
    ledger.settle(one(30.0, 100), [], 30.0)
    ledger.name(lease(BARE, closed=20.0), lease(JOB, closed=20.0), 30.0)
    assert total(ledger, Level.WORKLOAD, "team-a", "Job", "train") == 100
    assert {level for level, _, _ in ledger.alive(30.0)} == {Level.NAMESPACE, Level.WORKLOAD}


def test_a_late_owner_is_on_pod_info() -> None:
    """A pod that has ended, but whose series still stand, is shown with the owner that was told meanwhile."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(BARE, closed=20.0)], 20.0)
    ledger.name(lease(BARE, closed=20.0), lease(JOB, closed=20.0), 21.0)
    assert [pod for level, _, pod in ledger.alive(21.0) if level is Level.POD] == [JOB]


def test_a_value_lives_as_long_as_a_namespace() -> None:
    """A label's series ends an hour after its last lease or byte, and goes on from its total when it returns."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(JOB, closed=20.0)], 20.0)
    assert (Level.LABEL, ("team-a", "x"), None) in list(ledger.alive(3620.0))
    assert list(ledger.alive(3621.0)) == []
    again = Lease(IP, JOB, "box-2", 8999.0, 9000.0)
    ledger.settle(one(9000.0, 101), [again], 9000.0)
    assert total(ledger, Level.LABEL, "team-a", "x") == 101


def stored(ledger: Ledger) -> dict[str, str | bytes]:
    """The rows of a ledger's checkpoint, of which every series was shown."""
    exposure = Exposure(zero_first=0.0)
    for at in (50.0, 51.0):
        exposure.view(ledger.totals, ledger.alive(at), at)
    return dict(encode(Checkpoint(ledger.state(), (), exposure.state())))


def test_label_series_go_on_after_a_restart() -> None:
    """Totals of the label's values are stored, with the label that they are of."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(JOB)], 20.0)
    again = Ledger(decode(stored(ledger)).ledger, limits=BY)
    assert again.totals == ledger.totals
    assert again.state() == ledger.state()


@pytest.mark.parametrize("key", ["", "team"])
def test_another_label_begins_at_zero(key: str) -> None:
    """With another label configured, or none, the old one's values are forgotten, and all else goes on."""
    ledger = begun()
    ledger.settle(one(20.0, 100), [lease(JOB)], 20.0)
    found = decode(stored(ledger))
    again = Ledger(found.ledger, limits=Limits(by_label=key))
    assert again.totals == {name: count for name, count in ledger.totals.items() if name.level is not Level.LABEL}
    assert {level for level, _, _ in again.alive(20.0)} == {Level.POD, Level.WORKLOAD, Level.NAMESPACE}
    assert set(found.exposure.only(again.totals).shown) == set(again.totals)


def test_a_state_from_before_there_were_labels_is_taken() -> None:
    """A store of a version that had no labels is read, and goes on."""
    ledger = begun(Limits())
    ledger.settle(one(20.0, 100), [lease(JOB)], 20.0)
    rows = stored(ledger)
    series = json.loads(rows["series"])
    del series["by_label"]
    found = decode({**rows, "series": json.dumps(series)})
    assert found.ledger == ledger.state()
    again = Ledger(found.ledger, limits=BY)
    again.settle(one(30.0, 130), [lease(JOB)], 30.0)
    assert total(again, Level.NAMESPACE, "team-a") == 130
    assert total(again, Level.LABEL, "team-a", "x") == 30


def test_what_was_shown_of_other_totals_is_forgotten() -> None:
    """Only what stands in the totals counts as shown."""
    key = SeriesKey(Level.LABEL, ("team-a", "x"), *IN[2:])
    shown = ExposureState({key: None, key._replace(traffic="pod"): 3.0})
    assert shown.only({key: Count(1, 1)}) == ExposureState({key: None})


def books(folder: Path, sources: list[str]) -> Books:
    """Books in a folder, of an agent with these sources; they began with a counter at 0."""
    path = folder / "netacct.yaml"
    path.write_text(json.dumps({"accounts_dir": str(folder / "accounts"), "metrics": {"by_label": "experiment"}}))
    made = Books(Store(folder / "state", Place("boot", "net")), config.load(str(path)), sources)
    if not made.resumed:
        made.ledger.baseline(one(10.0, 0), 10.0)
    return made


def hear(to: Books, source: str, pod: Pod, at: float, octets: int, *, present: bool = True) -> None:
    """A source speaks when the counter stands at so many bytes; the change is committed and stored."""
    to.note(Update(source, (Observation(source, IP, pod, "box" if source == "cni" else "", at, at, present),)))
    to.settle(one(at, octets), at)
    to.commit(at)
    to.save(at)


def records(folder: Path) -> list[tuple[str, str, int]]:
    """Workload, label and bytes of each account."""
    file = folder / "accounts" / "accounts.jsonl"
    found = read_files([file], pytest.fail) if file.exists() else []
    return [
        (one.workload, one.labels.get("experiment", ""), sum(n.bytes for n in one.counts.values())) for one in found
    ]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_of_a_second_has_its_owner_and_all_its_bytes(tmp_path: Path, restarts: bool) -> None:
    """A pod that CNI saw come and go, and whose owner is told after it, is whole in workload, label and account."""
    made = books(tmp_path, ["kubelet", "cni"])
    hear(made, "cni", BARE, 11.0, 0)
    hear(made, "cni", BARE, 12.0, 5000, present=False)
    assert records(tmp_path) == []
    if restarts:
        made = books(tmp_path, ["kubelet", "cni"])
    hear(made, "kubelet", JOB, 14.0, 5000, present=False)
    made.settle(one(15.0, 5000), 15.0)
    made.save(15.0)
    assert of(made.ledger, Level.WORKLOAD) == {("team-a", "Job", "train"): 5000}
    assert of(made.ledger, Level.LABEL) == {("team-a", "x"): 5000}
    assert records(tmp_path) == [("train", "x", 5000)]


@pytest.mark.parametrize(("sources", "waits"), [(["kubelet", "cni"], True), (["cni"], False), (["file", "cni"], False)])
def test_an_account_waits_for_its_owner_but_not_for_ever(tmp_path: Path, sources: list[str], waits: bool) -> None:
    """Without an owner an account waits for late_binding, and only where a source is configured that tells owners."""
    made = books(tmp_path, sources)
    hear(made, "cni", BARE, 11.0, 0)
    hear(made, "cni", BARE, 12.0, 5000, present=False)
    for at, is_there in ((13.0, not waits), (131.9, not waits), (132.0, True)):
        made.settle(one(at, 5000), at)
        made.save(at)
        assert records(tmp_path) == ([("", "", 5000)] if is_there else [])
    hear(made, "kubelet", JOB, 133.0, 5000, present=False)
    assert of(made.ledger, Level.WORKLOAD) == {}
    assert records(tmp_path) == [("", "", 5000)]


@pytest.mark.parametrize("reloads", [False, True])
def test_a_reload_that_adds_who_tells_owners_lets_accounts_wait_for_them(tmp_path: Path, reloads: bool) -> None:
    """Whose word is waited for, and believed first, is as in the configuration of now."""
    made = books(tmp_path, ["cni"])
    if reloads:
        path = tmp_path / "other.yaml"
        path.write_text(
            json.dumps({"accounts_dir": str(tmp_path / "accounts"), "identity": {"sources": ["kubelet", "cni"]}})
        )
        made.reconfigure(config.load(str(path)))
    hear(made, "cni", BARE, 11.0, 0)
    hear(made, "cni", BARE, 12.0, 5000, present=False)
    assert len(records(tmp_path)) == (0 if reloads else 1)
