"""The file source follows a real file with real inotify."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netacct import inotify_hub
from netacct.following import entries
from netacct.identity.file import FileSource
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import unpack

LATENCY = 60.0
"""Seconds that a test waits for a change, also on a machine that stands still; the source itself needs about 25 ms."""


def pods(*ips: str) -> str:
    """A pods file with one pod for each address."""
    return "pods:\n" + "".join(f"- {{namespace: a, name: p{i}, ips: ['{ip}']}}\n" for i, ip in enumerate(ips))


class Follower:
    """A running source and what it said."""

    def __init__(self, path: Path, poll: float = 3600.0) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = FileSource(str(path), poll)
        self.source.start(self.events.put)

    def next(self) -> list[str]:
        """The addresses of the next event."""
        event = self.events.get(timeout=LATENCY)
        assert isinstance(event, Replace)
        return [unpack(observation.ip) for observation in event.observations]

    def quiet(self) -> bool:
        """Whether nothing is said for a while."""
        try:
            self.events.get(timeout=0.15)
        except queue.Empty:
            return True
        return False

    def health(self, up: bool) -> Health:
        """The health, once it is as expected or the time is over."""
        end = time.monotonic() + LATENCY
        while self.source.healthy().up != up and time.monotonic() < end:
            time.sleep(0.005)
        return self.source.healthy()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the pods file is, or will be."""
    directory = tmp_path / "etc"
    directory.mkdir()
    return directory / "pods.yaml"


@pytest.fixture
def follower(path: Path) -> Iterator[Follower]:
    """A source on a file with one address, whose first event is taken."""
    path.write_text(pods("10.0.0.1"))
    running = Follower(path)
    assert running.next() == ["10.0.0.1"]
    yield running
    running.source.stop()


def test_the_first_list_is_there_when_start_returns(path: Path) -> None:
    """`start` reads the file itself, so that the agent never installs rules for an empty node."""
    path.write_text(pods("10.0.0.1"))
    running = Follower(path)
    running.source.stop()
    assert running.events.get_nowait().source == "file"


def test_a_rename_over_the_file_is_seen(follower: Follower, path: Path) -> None:
    """An editor that writes a new file and renames it over the old one gives one event."""
    new = path.with_name("pods.yaml.new")
    new.write_text(pods("10.0.0.2"))
    new.rename(path)
    assert follower.next() == ["10.0.0.2"]
    assert follower.quiet()


def test_writing_in_place_is_seen_when_it_is_done(follower: Follower, path: Path) -> None:
    """A slow writer is not read before it closes the file, so that no half of a list is taken."""
    with path.open("w") as writer:
        writer.write(pods("10.0.0.2"))
        writer.flush()
        (path.parent / "unrelated").write_text("x")
        assert follower.quiet()
        writer.write("- {namespace: a, name: last, ips: [10.0.0.3]}\n")
    assert follower.next() == ["10.0.0.2", "10.0.0.3"]


def test_a_new_file_is_seen_when_it_is_done(path: Path) -> None:
    """A file that appears is not read before its writer closes it."""
    running = Follower(path)
    assert running.next() == []
    with path.open("w") as writer:
        writer.write(pods("10.0.0.2"))
        writer.flush()
        assert running.quiet()
    assert running.next() == ["10.0.0.2"]
    running.source.stop()


def test_a_configmap_swap_is_seen(path: Path) -> None:
    """The kubelet's way: pods.yaml links into ..data, a link that is renamed over to a new directory."""
    directory = path.parent
    for version, ip in (("..1", "10.0.0.1"), ("..2", "10.0.0.2"), ("..3", "10.0.0.3")):
        (directory / version).mkdir()
        (directory / version / "pods.yaml").write_text(pods(ip))
    (directory / "..data").symlink_to("..1")
    path.symlink_to("..data/pods.yaml")
    running = Follower(path)
    assert running.next() == ["10.0.0.1"]
    for version, old, ip in (("..2", "..1", "10.0.0.2"), ("..3", "..2", "10.0.0.3")):
        (directory / "..data_tmp").symlink_to(version)
        (directory / "..data_tmp").rename(directory / "..data")
        shutil.rmtree(directory / old)
        assert running.next() == [ip]
    running.source.stop()


def test_a_link_to_another_directory_is_followed(path: Path, tmp_path: Path) -> None:
    """Behind a link both the target and the link itself are watched."""
    for name, ip in (("one", "10.0.0.1"), ("two", "10.0.0.2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p").write_text(pods(ip))
    path.symlink_to(tmp_path / "one" / "p")
    running = Follower(path)
    assert running.next() == ["10.0.0.1"]
    (tmp_path / "one" / "p").write_text(pods("10.0.0.9"))
    assert running.next() == ["10.0.0.9"]
    path.unlink()
    assert running.next() == []
    path.symlink_to(tmp_path / "two" / "p")
    assert running.next() == ["10.0.0.2"]
    running.source.stop()


def test_a_missing_file_is_an_empty_list_until_it_appears(tmp_path: Path) -> None:
    """Without file, directory and the directory above, the source is healthy and empty; it sees each of them come."""
    path = tmp_path / "a" / "b" / "pods.yaml"
    running = Follower(path)
    assert (running.next(), running.source.healthy()) == ([], Health(up=True))
    path.parent.mkdir(parents=True)
    path.write_text(pods("10.0.0.1"))
    assert running.next() == ["10.0.0.1"]
    shutil.rmtree(tmp_path / "a")
    assert running.next() == []
    path.parent.mkdir(parents=True)
    time.sleep(0.1)
    path.write_text(pods("10.0.0.2"))
    assert running.next() == ["10.0.0.2"]
    running.source.stop()


def test_a_bad_file_changes_nothing_but_health(follower: Follower, path: Path) -> None:
    """An error keeps the last list and makes the source unhealthy with the error, until the file is mended."""
    path.write_text(pods("10.0.0.2") + "- {namespace: a}\n")
    health = follower.health(up=False)
    assert health.reason == f"{path}:3: pods[1]: has no name (allowed: letters, digits, '-', '_', '.')"
    assert follower.quiet()
    path.write_text(pods("10.0.0.1"))
    assert follower.next() == ["10.0.0.1"]
    assert follower.source.healthy() == Health(up=True)


def test_a_truncated_file_changes_nothing(follower: Follower, path: Path) -> None:
    """A file that was cut to nothing is an error, not an empty node."""
    path.write_text("")
    assert "has no list pods" in follower.health(up=False).reason
    assert follower.quiet()


def test_a_directory_or_pipe_in_its_place_is_an_error(path: Path) -> None:
    """What is not a regular file is refused without being read, and never blocks."""
    os.mkfifo(path)
    running = Follower(path)
    assert running.source.healthy() == Health(up=False, reason=f"{path}: cannot be read: it is no regular file")
    path.unlink()
    assert running.next() == []
    path.mkdir()
    assert not running.health(up=False).up
    running.source.stop()


def test_a_file_that_recovers_unchanged_is_healthy_again(follower: Follower, path: Path) -> None:
    """A file that was in the way of a directory and comes back with its old content makes the source healthy."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()
    assert not follower.health(up=False).up
    path.rmdir()
    aside.rename(path)
    while follower.next() != ["10.0.0.1"]:
        pass  # it may have seen that there was nothing for a moment
    assert follower.health(up=True).up


def test_the_same_content_is_no_event(follower: Follower, path: Path) -> None:
    """A file that was written again with what it had is not news."""
    path.write_text(pods("10.0.0.1"))
    assert follower.quiet()


def test_without_inotify_the_file_is_polled(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Where the kernel has no inotify instance left, a change is seen at the next look."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(inotify_hub, "Inotify", refuse)
    path.write_text(pods("10.0.0.1"))
    running = Follower(path, poll=0.05)
    assert running.next() == ["10.0.0.1"]
    path.with_name("new").write_text(pods("10.0.0.2"))
    path.with_name("new").rename(path)
    assert running.next() == ["10.0.0.2"]
    running.source.stop()


def test_stop_ends_thread_and_descriptors(path: Path) -> None:
    """Starting and stopping leaves no thread and no open descriptor, and a second stop is harmless."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names are wanted
    running = Follower(path)
    running.source.stop()
    running.source.stop()
    assert not any(thread.name == "source-file" for thread in threading.enumerate())
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 -- as above


def test_changes_come_by_themselves(follower: Follower, path: Path) -> None:
    """Each of five changes is told before the next one is made, although the next look is an hour away."""
    for index in range(5):
        path.with_name("new").write_text(pods(f"10.0.1.{index}"))
        path.with_name("new").rename(path)
        assert follower.next() == [f"10.0.1.{index}"]


def test_entries_that_decide_a_path(tmp_path: Path) -> None:
    """The watched entries are the file, links on the way, and the first missing part."""
    real = tmp_path.resolve()
    (real / "data").mkdir()
    (real / "link").symlink_to("data")
    assert set(entries(str(real / "link" / "p"))) == {(str(real / "link"), "p"), (str(real), "link")}
    assert set(entries(str(real / "none" / "deep" / "p"))) == {(str(real), "none")}
    (real / "loop").symlink_to("loop")
    assert set(entries(str(real / "loop"))) == {(str(real), "loop")}
