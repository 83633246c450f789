"""The source `cni` follows real directories with real inotify."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import eventually as until

from netacct import clock, following
from netacct.identity import pods_file
from netacct.identity.cni import CniSource
from netacct.identity.leases import LeaseBook
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.inotify import Event, Inotify
from netacct.model import UNBOUNDED, Observation, pack, unpack

LATENCY = 60.0
"""Seconds that a test waits for a change, also on a machine that stands still; the source needs about a millisecond."""


def result(*ips: str, pod: str = "train-0", uid: str = "u0", sandbox: str = "s0", netns: str = "") -> bytes:
    """A cache file."""
    return json.dumps(
        {
            "kind": "cniCacheV1",
            "containerId": sandbox,
            "ifName": "eth0",
            "networkName": "pods",
            "netns": netns,
            "cniArgs": [["K8S_POD_NAMESPACE", "team-a"], ["K8S_POD_NAME", pod], ["K8S_POD_UID", uid]],
            "result": {"cniVersion": "1.0.0", "ips": [{"address": ip} for ip in ips]},
        }
    ).encode()


class Follower:
    """A running source and what it said."""

    def __init__(self, *directories: Path, rescan: float = 3600.0) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = CniSource([str(directory) for directory in directories], rescan)
        self.source.start(self.events.put)
        first = self.events.get(timeout=LATENCY)
        assert isinstance(first, Replace)
        self.first = first.observations

    def next(self) -> tuple[Observation, ...]:
        """The observations of the next event."""
        event = self.events.get(timeout=LATENCY)
        assert isinstance(event, Update)
        return event.observations

    def quiet(self, seconds: float = 0.15) -> bool:
        """Whether nothing is said for a while."""
        try:
            self.events.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes followers, and stops them."""
    made: list[Follower] = []

    def start(*directories: Path, rescan: float = 3600.0) -> Follower:
        made.append(Follower(*directories, rescan=rescan))
        return made[-1]

    yield start
    for follower in made:
        follower.source.stop()


def words(observations: tuple[Observation, ...]) -> list[tuple[str, str, bool]]:
    """Address, sandbox and presence of each observation."""
    return [(unpack(seen.ip), seen.sandbox, seen.present) for seen in observations]


def logged(capsys: pytest.CaptureFixture[str], word: str) -> str:
    """What was logged, as soon as this is part of it."""
    text, end = "", time.monotonic() + LATENCY
    while word not in (text := text + capsys.readouterr().out):
        assert time.monotonic() < end, text
        time.sleep(0.005)
    return text


def test_what_is_there_is_told_first(tmp_path: Path, follow: Follow) -> None:
    """The first event holds every address of every file, with the file's age as the sandbox's."""
    path = tmp_path / "pods-s0-eth0"
    path.write_bytes(result("10.0.0.1/24", "fd00::1/64"))
    (tmp_path / "cni-loopback-s0-lo").write_bytes(b"never read")
    begin = clock.now()
    written = time.time() - 1000
    os.utime(path, (written, written))
    end = clock.now()
    first = follow(tmp_path).first
    assert words(first) == [("10.0.0.1", "s0", True), ("fd00::1", "s0", True)]
    assert all(begin - 2 < seen.created + 1000 < end + 2 for seen in first)


def test_a_file_that_comes_and_goes(tmp_path: Path, follow: Follow) -> None:
    """A written file is told once it is closed, and its removal takes back the same observation."""
    follower = follow(tmp_path)
    assert follower.first == ()
    path = tmp_path / "pods-s0-eth0"
    with path.open("wb") as file:
        data = result("10.0.0.1/24")
        file.write(data[:50])
        file.flush()
        assert follower.quiet()
        file.write(data[50:])
    came = follower.next()
    assert words(came) == [("10.0.0.1", "s0", True)]
    path.unlink()
    gone = follower.next()
    assert words(gone) == [("10.0.0.1", "s0", False)]
    assert gone[0].pod == came[0].pod
    assert gone[0].seen_at > came[0].seen_at
    assert follower.quiet()


def test_a_file_that_is_renamed_into_place(tmp_path: Path, follow: Follow) -> None:
    """A runtime that writes aside and renames is followed as well."""
    directory = tmp_path / "results"
    directory.mkdir()
    follower = follow(directory)
    (tmp_path / "new").write_bytes(result("10.0.0.1/24"))
    (tmp_path / "new").rename(directory / "pods-s0-eth0")
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]


def test_a_directory_that_appears_later(tmp_path: Path, follow: Follow) -> None:
    """Directories that are made after the start, several levels at once, are followed, and gone again when removed."""
    directory = tmp_path / "lib" / "cni" / "results"
    follower = follow(directory)
    assert follower.source.healthy().up
    for turn in range(3):
        directory.mkdir(parents=True)
        (directory / "pods-s0-eth0").write_bytes(result("10.0.0.1/24", sandbox=f"s{turn}"))
        assert words(follower.next()) == [("10.0.0.1", f"s{turn}", True)]
        shutil.rmtree(tmp_path / "lib")
        assert words(follower.next()) == [("10.0.0.1", f"s{turn}", False)]


def test_a_directory_that_appears_while_its_parent_is_not_watched_yet(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that no event told of, because it came while the watches were being made, is followed."""
    directory, watch = tmp_path / "results", Inotify.watch

    def late(self: Inotify, path: str) -> int:
        if path == str(tmp_path):
            directory.mkdir(exist_ok=True)
        return watch(self, path)

    monkeypatch.setattr(Inotify, "watch", late)
    follower = follow(directory)
    (directory / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]


def test_two_names_of_one_directory_are_one(tmp_path: Path, follow: Follow) -> None:
    """Where a configured directory is a link to another one, each file is told once and gone once."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    follower = follow(real, link)
    (real / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]
    (real / "pods-s0-eth0").unlink()
    assert words(follower.next()) == [("10.0.0.1", "s0", False)]
    assert follower.quiet()


def test_garbage_is_named_once_and_takes_nothing_back(
    tmp_path: Path, follow: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of garbage are logged once each, and one that overwrites a good file does not take its word back."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "empty-s1-eth0").write_bytes(b"")
    (results / "note").write_text("hello")
    (results / "folder").mkdir()
    os.mkfifo(results / "pipe")
    path, aside = results / "pods-s0-eth0", tmp_path / "aside"
    path.write_bytes(result("10.0.0.1/24"))
    follower = follow(results, rescan=0.05)
    assert words(follower.first) == [("10.0.0.1", "s0", True)]
    aside.write_bytes(b"{")
    aside.rename(path)  # as a whole: one that is being written has an error of its own
    text = logged(capsys, path.name)
    assert follower.quiet(0.3)
    assert follower.source.healthy().up
    text += capsys.readouterr().out
    assert [text.count(name) for name in ("empty-s1-eth0", "note", "pods-s0-eth0")] == [1, 1, 1]
    assert "folder" not in text
    assert "pipe" not in text
    path.unlink()
    assert words(follower.next()) == [("10.0.0.1", "s0", False)]


def test_files_from_before_the_boot_are_ignored(tmp_path: Path, follow: Follow) -> None:
    """A file older than the boot is stale, but for one whose network namespace still exists."""
    alive = tmp_path / "netns-alive"
    alive.touch()
    results = tmp_path / "results"
    results.mkdir()
    before = time.time() - clock.now() - 1000
    for name, netns in (("stale", "/proc/1/ns/net"), ("unknown", ""), ("alive", str(alive)), ("dead", f"{alive}-not")):
        path = results / f"pods-{name}-eth0"
        path.write_bytes(result("10.0.0.1/24", sandbox=name, netns=netns))
        os.utime(path, (before, before))
    first = follow(results).first
    assert words(first) == [("10.0.0.1", "alive", True)]
    assert first[0].created == UNBOUNDED


def test_a_clock_that_was_set_back_makes_no_sandbox_of_the_future(tmp_path: Path, follow: Follow) -> None:
    """A file whose time lies in the future was made no later than it was seen."""
    path = tmp_path / "pods-s0-eth0"
    path.write_bytes(result("10.0.0.1/24"))
    os.utime(path, (time.time() + 5000, time.time() + 5000))
    (seen,) = follow(tmp_path).first
    assert seen.created <= seen.seen_at <= clock.now()


def test_a_file_that_outlives_its_network_namespace(tmp_path: Path, follow: Follow) -> None:
    """Where a DEL failed, the file's word ends at the rescan after its network namespace went away."""
    netns = tmp_path / "netns"
    netns.touch()
    results = tmp_path / "results"
    results.mkdir()
    (results / "pods-s0-eth0").write_bytes(result("10.0.0.1/24", netns=str(netns)))
    follower = follow(results, rescan=0.05)
    assert words(follower.first) == [("10.0.0.1", "s0", True)]
    assert follower.quiet()
    netns.unlink()
    assert words(follower.next()) == [("10.0.0.1", "s0", False)]
    assert follower.quiet()


def test_what_no_event_told_is_found_by_the_rescan(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every event lost, files that came and went are found when the directory is looked at anew."""
    monkeypatch.setattr(Inotify, "events", lambda self: os.read(self.fd, 65536) and [])
    follower = follow(tmp_path, rescan=0.1)
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]
    (tmp_path / "pods-s0-eth0").unlink()
    assert words(follower.next()) == [("10.0.0.1", "s0", False)]


def test_an_overflow_leads_to_a_rescan_at_once(tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel says that events were lost, everything is looked at, long before it is due."""
    monkeypatch.setattr(Inotify, "events", lambda self: os.read(self.fd, 65536) and [Event(-1, "", created=False)])
    follower = follow(tmp_path)
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]


def test_without_inotify_it_polls(tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no inotify instance is left, changes are found by looking."""

    def none_left(_self: Inotify) -> None:
        raise OSError(errno.EMFILE, "no instances")

    monkeypatch.setattr(Inotify, "__init__", none_left)
    monkeypatch.setattr(following, "POLL_WITHOUT_INOTIFY", 0.05)
    follower = follow(tmp_path)
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert words(follower.next()) == [("10.0.0.1", "s0", True)]


def test_a_directory_that_cannot_be_read_is_unhealthy(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a directory cannot be read, what was known of it holds and the source says why it is down."""
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    follower = follow(tmp_path, rescan=0.05)
    listdir = os.listdir

    def refused(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refused)
    until(lambda: not follower.source.healthy().up)
    assert follower.source.healthy().reason == f"{tmp_path} cannot be read: Permission denied"
    monkeypatch.setattr(os, "listdir", listdir)
    until(lambda: follower.source.healthy().up)
    assert follower.quiet()


def test_a_new_pod_takes_the_address_while_the_old_file_is_still_there(tmp_path: Path, follow: Follow) -> None:
    """Of two files that claim one address the newer has the lease, and the old one's doubled removal takes nothing."""
    follower = follow(tmp_path)
    book = LeaseBook(["cni"])
    old, new = tmp_path / "pods-s0-eth0", tmp_path / "pods-s1-eth0"
    for step, (path, data) in enumerate(
        [(old, result("10.0.0.1/24")), (new, result("10.0.0.1/24", pod="train-1", uid="u1", sandbox="s1")), (old, b"")]
    ):
        path.write_bytes(data) if data else path.unlink()
        seen = follower.next()
        for _ in range(2):
            book.observe(seen)
        book.commit(clock.now())
        lease = book.lease_of(pack("10.0.0.1"))
        assert lease is not None
        assert lease.sandbox == ("s0" if step == 0 else "s1")


def test_a_pods_file_adds_what_cni_does_not_know(tmp_path: Path, follow: Follow) -> None:
    """A pods file that lists the same pod by uid gives the lease its owner and labels, and CNI the sandbox's age."""
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    book = LeaseBook(["file", "cni"])
    entry = "{namespace: team-a, name: train-0, uid: u0, ips: [10.0.0.1], owner: {kind: Job, name: train}}"
    book.observe(pods_file.parse(f"pods: [{entry}]".encode(), "pods.yaml", clock.now()))
    book.commit(clock.now())
    first = book.lease_of(pack("10.0.0.1"))
    book.observe(follow(tmp_path).first)
    book.commit(clock.now())
    lease = book.lease_of(pack("10.0.0.1"))
    assert lease is not None
    assert first is not None
    assert (lease.pod, lease.opened, lease.sandbox) == (first.pod, first.opened, "s0")
    assert lease.pod.workload == "train"
    assert lease.created > 0
    assert lease.sources == {"file", "cni"}


def test_events_come_at_once(tmp_path: Path, follow: Follow) -> None:
    """A hundred files written one after the other give a hundred events, each before the next file is written."""
    follower = follow(tmp_path)
    for number in range(100):
        (tmp_path / f"pods-s{number}-eth0").write_bytes(result(f"10.0.0.{number}/24", sandbox=f"s{number}"))
        assert words(follower.next()) == [(f"10.0.0.{number}", f"s{number}", True)]


def test_stopping_ends_the_thread(tmp_path: Path) -> None:
    """After `stop`, also twice, no thread is left and nothing more is said."""
    follower = Follower(tmp_path)
    follower.source.stop()
    follower.source.stop()
    assert "source-cni" not in {thread.name for thread in threading.enumerate()}
    (tmp_path / "pods-s0-eth0").write_bytes(result("10.0.0.1/24"))
    assert follower.quiet()
