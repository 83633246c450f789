"""Following configuration, policy and lists: what is told, and when."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netacct import inotify_hub
from netacct.watch import FileWatch

PATIENCE = 60.0
"""Seconds for what must come; a slow machine needs some."""

SILENCE = 0.6
"""Seconds without a call that count as none: three times what is waited for quiet."""

HOUR = 3600.0
"""To the next look without a sign: nothing here is found by looking."""


class Told:
    """A watch, and what it told."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        self.watch = FileWatch(self.calls.put, poll=HOUR)
        self.watch.start()

    def follow(self, *paths: Path, at: float | None = None) -> None:
        """Follow files that were read just now, or after the time `at`."""
        mark = self.watch.mark()._replace(at=time.time() + 1 if at is None else at)
        self.watch.follow([str(path) for path in paths], mark)

    def next(self) -> set[str]:
        """The names of the files in the next call."""
        return {os.path.basename(path) for path in self.calls.get(timeout=PATIENCE)}  # noqa: PTH119 -- plain strings

    def silent(self) -> bool:
        """Whether nothing is told for a while."""
        try:
            self.calls.get(timeout=SILENCE)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def told() -> Iterator[Told]:
    """A watch that runs."""
    made = Told()
    yield made
    made.watch.stop()


def test_a_write_is_told(told: Told, tmp_path: Path) -> None:
    """A file that is written and closed is told, by its absolute path, and only it."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("a")
    other.write_text("a")
    told.follow(one, other)
    with one.open("r+") as file:  # not emptied first, which would be a change of its own
        file.write("bb")
    assert told.calls.get(timeout=PATIENCE) == {str(one)}
    assert told.silent()


def test_a_rename_over_is_told(told: Told, tmp_path: Path) -> None:
    """A file that is replaced as a whole, as downloads and editors do it, is told."""
    (tmp_path / "list").write_text("a")
    told.follow(tmp_path / "list")
    (tmp_path / "draft").write_text("b")
    (tmp_path / "draft").rename(tmp_path / "list")
    assert told.next() == {"list"}


def test_coming_and_going_is_told(told: Told, tmp_path: Path) -> None:
    """A missing file is followed until it appears, also when its folder is missing too; so is one that goes."""
    file = tmp_path / "a/b/list"
    told.follow(file)
    assert told.silent()
    file.parent.mkdir(parents=True)
    file.write_text("a")
    assert told.next() == {"list"}
    file.unlink()
    assert told.next() == {"list"}


def test_a_swapped_link_is_told(told: Told, tmp_path: Path) -> None:
    """A ConfigMap, where a link to the folder of all files is swapped, is told once."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        for file in ("netacct.yaml", "policy.yaml"):
            (tmp_path / name / file).write_text(name)
    (tmp_path / "..data").symlink_to("v1")
    for file in ("netacct.yaml", "policy.yaml"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    told.follow(tmp_path / "netacct.yaml", tmp_path / "policy.yaml")
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert told.next() == {"netacct.yaml", "policy.yaml"}
    assert told.silent()


def test_many_writes_are_one_change(told: Told, tmp_path: Path) -> None:
    """Writes in quick succession, to several files, are told together when they are over."""
    files = [tmp_path / str(number) for number in range(5)]
    told.follow(*files)
    for file in files:
        file.write_text("a")
    names = told.next()
    while len(names) < len(files):  # a machine under load may pause between two of them
        names |= told.next()
    assert names == {file.name for file in files}


def test_neighbours_are_not_told(told: Told, tmp_path: Path) -> None:
    """Other files of the folder are nobody's business."""
    (tmp_path / "list").write_text("a")
    told.follow(tmp_path / "list")
    (tmp_path / "list.new").write_text("b")
    (tmp_path / "sub").mkdir()
    assert told.silent()


def test_a_file_that_is_being_written_is_not_told(told: Told, tmp_path: Path) -> None:
    """A file that its writer has made and not closed yet is left alone until it is."""
    told.follow(tmp_path / "list")
    assert told.silent()
    with (tmp_path / "list").open("w") as file:
        file.write("half")
        file.flush()
        assert told.silent()
    assert told.next() == {"list"}


def test_what_changed_while_it_was_read_is_told(told: Told, tmp_path: Path) -> None:
    """A file that is younger than its reading is told when following begins; one that is older is not."""
    (tmp_path / "list").write_text("a")
    told.follow(tmp_path / "list", at=time.time() - 5)
    assert told.next() == {"list"}
    assert told.silent()


def test_following_others_forgets(told: Told, tmp_path: Path) -> None:
    """After another call of `follow` the files of before are followed only if they are named again."""
    for name in ("kept", "left", "new"):
        (tmp_path / name).write_text("a")
    told.follow(tmp_path / "kept", tmp_path / "left")
    told.follow(tmp_path / "kept", tmp_path / "new")
    (tmp_path / "left").write_text("bb")
    assert told.silent()
    (tmp_path / "kept").write_text("bb")
    assert told.next() == {"kept"}
    (tmp_path / "new").write_text("bb")
    assert told.next() == {"new"}


def test_a_change_between_two_calls_is_not_lost(tmp_path: Path) -> None:
    """What changes before the thread runs, or while files are named again, is told."""
    (tmp_path / "list").write_text("a")
    calls: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
    made = FileWatch(calls.put, poll=HOUR)
    made.follow([str(tmp_path / "list")], made.mark()._replace(at=time.time() + 1))
    mark = made.mark()
    (tmp_path / "list").write_text("bb")
    made.follow([str(tmp_path / "list")], mark)
    made.start()
    try:
        assert calls.get(timeout=PATIENCE) == {str(tmp_path / "list")}
    finally:
        made.stop()


def test_what_was_read_since_is_not_told(told: Told, tmp_path: Path) -> None:
    """A change that somebody read, who had taken a mark before, is not told once more."""
    (tmp_path / "list").write_text("a")
    told.follow(tmp_path / "list")
    assert told.silent()
    while True:
        (tmp_path / "list").write_text("bb")
        told.follow(tmp_path / "list")
        if told.calls.empty():
            break
        told.next()  # a machine that stands still between the two has it told before it was read
    assert told.silent()


def test_a_listener_that_raises_hears_the_next(tmp_path: Path) -> None:
    """An exception of the listener does not end the following."""
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def listen(_: frozenset[str]) -> None:
        heard.put(1)
        raise RuntimeError("a test")

    made = FileWatch(listen, poll=HOUR)
    made.follow([str(tmp_path / "list")], made.mark())
    made.start()
    try:
        for text in ("a", "bb"):
            (tmp_path / "list").write_text(text)
            assert heard.get(timeout=PATIENCE)
    finally:
        made.stop()


def test_without_inotify_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no inotify instance left, changes are found by looking."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(inotify_hub, "Inotify", refuse)
    calls: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
    made = FileWatch(calls.put, poll=0.05)
    made.follow([str(tmp_path / "list")], made.mark())
    made.start()
    try:
        (tmp_path / "list").write_text("a")
        assert calls.get(timeout=PATIENCE) == {str(tmp_path / "list")}
    finally:
        made.stop()


def test_stopping_frees_everything(tmp_path: Path) -> None:
    """After stop, which may be called twice, no descriptor is left and nothing is told; it can start again."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names are wanted
    calls: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
    made = FileWatch(calls.put, poll=HOUR)
    made.stop()
    made.start()
    made.follow([str(tmp_path / "list")], made.mark())
    made.stop()
    made.stop()
    (tmp_path / "list").write_text("a")
    assert calls.empty()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 -- as above
    made.start()
    assert calls.get(timeout=PATIENCE)
    made.stop()
