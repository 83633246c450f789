"""Many followers share one inotify instance: who gets what, what ends when, and what happens where there is none."""

from __future__ import annotations

import errno
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from netacct import following, inotify_hub, log
from netacct.following import Follower, Pace, contents
from netacct.inotify import Event, Inotify
from netacct.inotify_hub import LOST, Hub, Share

PATIENCE = 60.0
"""Seconds for what must come."""

SILENCE = 0.2
"""Seconds without an event that count as none."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of its own, all of whose shares end with the test."""
    made = Hub()
    yield made
    for share in list(made._shares):
        share.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to be watched."""
    made = tmp_path / "place"
    made.mkdir()
    return made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The kernel gives no instance until this is called."""
    with monkeypatch.context() as patch:

        def refuse() -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(inotify_hub, "Inotify", refuse)
        yield patch.undo


def come(share: Share, seconds: float = PATIENCE) -> list[Event]:
    """The next events of a share; none after a time."""
    poll = select.poll()
    poll.register(share.fd, select.POLLIN)
    while poll.poll(seconds * 1000):
        if events := share.events():
            return events
    return []


def until(share: Share, want: Callable[[Event], bool]) -> Event:
    """The first event of this kind."""
    while events := come(share):
        for event in events:
            if want(event):
                return event
    pytest.fail("it did not come")


def named(name: str) -> Callable[[Event], bool]:
    """Whether an event is about this entry."""
    return lambda event: event.name == name


def instances() -> int:
    """How many inotify instances this process holds."""
    found = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]  # noqa: PTH118, PTH208 -- strings
    return sum(os.path.islink(each) and os.readlink(each) == "anon_inode:inotify" for each in found)  # noqa: PTH114, PTH115 -- as above


def threads() -> int:
    """How many threads of hubs there are."""
    return sum(thread.name == "inotify" for thread in threading.enumerate())


def watches(hub: Hub) -> int:
    """How many watches the kernel has for the hub's instance."""
    assert hub._inotify is not None
    return Path(f"/proc/self/fdinfo/{hub._inotify.fd}").read_text(encoding="ascii").count("inotify wd:")


def test_the_instance_lives_from_the_first_share_to_the_last(hub: Hub) -> None:
    """However many share, there is one instance and one thread; the last to leave ends both, the next begins anew."""
    before = instances(), threads()
    for _ in range(2):
        shares = [hub.share() for _ in range(8)]
        assert (instances(), threads()) == (before[0] + 1, before[1] + 1)
        for share in shares:
            share.close()
            share.close()
        assert (instances(), threads()) == before


def test_without_a_thread_there_is_no_instance(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that came when no thread could be started is told once there is one, and leaves nothing behind."""
    before = instances(), threads()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        share = hub.share()
        assert not share.ready()
        assert instances() == before[0]
    assert share.ready()
    share.watch(str(place))
    (place / "a").write_text("x")
    assert until(share, named("a"))
    share.close()
    assert (instances(), threads()) == before


def test_a_directory_of_two_is_watched_until_both_gave_it_up(hub: Hub, place: Path) -> None:
    """Two who watch one directory get one number and each event both; when one leaves, the other goes on."""
    one, two = hub.share(), hub.share()
    assert one.watch(str(place)) == two.watch(str(place))
    (place / "a").touch()
    assert until(one, named("a")).watch == until(two, named("a")).watch
    one.close()
    (place / "b").touch()
    until(two, named("b"))
    assert watches(hub) == 1
    two.unwatch(two.watch(str(place)))
    assert watches(hub) == 0


def test_who_does_not_watch_a_directory_hears_nothing_of_it(hub: Hub, place: Path, tmp_path: Path) -> None:
    """Events go to who watches; who gave the directory up, or never had it, is not even woken."""
    one, two, three = hub.share(), hub.share(), hub.share()
    one.watch(str(place))
    two.unwatch(two.watch(str(place)))
    three.watch(str(tmp_path))
    (place / "a").touch()
    until(one, named("a"))
    assert come(two, SILENCE) == []
    assert come(three, SILENCE) == []


def test_a_deleted_directory_is_gone_for_all_and_can_be_watched_anew(hub: Hub, place: Path) -> None:
    """All holders hear that a watch is gone; giving it up is harmless, and the next directory has another number."""
    one, two = hub.share(), hub.share()
    number = one.watch(str(place))
    two.watch(str(place))
    place.rmdir()
    assert until(one, lambda event: event.gone).watch == until(two, lambda event: event.gone).watch == number
    place.mkdir()
    assert one.watch(str(place)) != number
    one.unwatch(number)
    (place / "a").touch()
    until(one, named("a"))


def test_an_overflow_is_told_to_all(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel dropped events, every share is told, whatever it watches."""
    monkeypatch.setattr(Inotify, "events", lambda self: os.read(self.fd, 65536) and [Event(-1, "", created=False)])
    one, two = hub.share(), hub.share()
    one.watch(str(place))
    (place / "a").touch()
    assert come(one) == come(two) == [LOST]


def test_who_does_not_take_its_events_loses_them(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many different events that wait for one share become one that says so, and the others lose nothing."""
    monkeypatch.setattr(inotify_hub, "PENDING", 20)
    slow, quick = hub.share(), hub.share()
    slow.watch(str(place))
    quick.watch(str(place))
    for number in range(30):
        (place / f"{number}").mkdir()
        until(quick, named(f"{number}"))
    assert 0 < len(found := slow.events()) <= 20
    assert found[0] == LOST


def test_equal_events_wait_once(hub: Hub, place: Path) -> None:
    """A file that is written again and again fills no queue."""
    one, other = hub.share(), hub.share()
    one.watch(str(place))
    other.watch(str(place))
    for _ in range(100):
        (place / "a").write_text("x")
    (place / "b").mkdir()
    until(other, named("b"))
    assert len(one.events()) <= 4


def test_a_watch_that_hangs_holds_up_nobody(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one follower waits for the kernel, as on a dead file server, others watch, hear and leave."""
    began, go, watch = threading.Event(), threading.Event(), Inotify.watch

    def slow(self: Inotify, directory: str) -> int:
        number = watch(self, directory)
        if threading.current_thread() is thread:
            began.set()
            assert go.wait(PATIENCE)
        return number

    late, one = hub.share(), hub.share()
    thread = threading.Thread(target=lambda: late.watch(str(place)))
    monkeypatch.setattr(Inotify, "watch", slow)
    one.watch(str(place))
    thread.start()
    assert began.wait(PATIENCE)
    (place / "a").touch()
    until(one, named("a"))
    one.close()
    go.set()
    thread.join()
    until(late, named("a"))
    (place / "b").touch()
    until(late, named("b"))
    late.unwatch(late.watch(str(place)))
    assert watches(hub) == 0


def test_a_failed_read_is_not_the_end(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the instance cannot be read, all are told that events were lost, and then it is read again."""
    events, failures = Inotify.events, iter([True])

    def fail(self: Inotify) -> list[Event]:
        if next(failures, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return events(self)

    monkeypatch.setattr(Inotify, "events", fail)
    monkeypatch.setattr(inotify_hub, "_PAUSE", 0.0)
    share = hub.share()
    share.watch(str(place))
    with capture_logs() as lines:
        (place / "a").touch()
        assert come(share)[0] == LOST
        (place / "b").touch()
        until(share, named("b"))
    assert [line["event"] for line in lines] == ["reading inotify failed"]


def test_where_no_instance_is_left_one_line_says_so(hub: Hub, free: Callable[[], None], place: Path) -> None:
    """Eight shares without an instance are one warning; when one of them gets it, the others are told to look."""
    with capture_logs() as lines:
        shares = [hub.share() for _ in range(8)]
        assert not any(share.ready() for share in shares)
        free()
        assert shares[3].ready()
        assert all(share.ready() for share in shares)
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "no inotify instance, polling"),
        ("info", "inotify instance got, no more polling"),
    ]
    assert [come(share, 0) for share in shares] == [[] if each == 3 else [LOST] for each in range(8)]
    shares[0].watch(str(place))
    (place / "a").touch()
    until(shares[0], named("a"))


def test_where_no_watch_is_left_one_line_says_so(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the user's watches are used up, whoever asks for one gets the error, and the log one warning."""

    def full(_self: Inotify, directory: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", directory)

    monkeypatch.setattr(Inotify, "watch", full)
    with capture_logs() as lines:
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                hub.share().watch(str(place))
    assert [(line["log_level"], line["event"]) for line in lines] == [("warning", "no inotify watch left, polling")]


class Followed:
    """A follower of a directory, with a poll that is far away, and what it looked at."""

    def __init__(self, place: Path, quiet: float = 0.0) -> None:
        self.looks: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self.follower = Follower(
            lambda: contents([str(place)]), self._look, Pace(3600.0, quiet, quiet), "test-follower", log.get()
        )
        self.follower.start()

    def _look(self, paths: frozenset[str] | None) -> None:
        self.looks.put(None if paths is None else sorted(map(os.path.basename, paths)))

    def next(self) -> list[str] | None:
        """The names of what was looked at next; None for everything."""
        return self.looks.get(timeout=PATIENCE)


def silent(looks: queue.SimpleQueue[list[str] | None]) -> bool:
    """Whether nothing was looked at for a while."""
    try:
        looks.get(timeout=SILENCE)
    except queue.Empty:
        return True
    return False


def until_signalled(followed: Followed, place: Path) -> None:
    """Write again and again until a follower that polled looks at what is written only; then it polls no more."""
    seen: list[str] | None = None
    while seen is None:
        (place / "a").write_text("x")
        seen = followed.next()
    assert seen == ["a"]
    assert any(silent(followed.looks) for _ in range(500))


def test_followers_of_one_directory_are_independent(place: Path) -> None:
    """Two followers of one directory both look at what is written, and one goes on when the other stopped."""
    one, two = Followed(place), Followed(place)
    try:
        assert one.next() is two.next() is None
        (place / "a").write_text("x")
        assert one.next() == two.next() == ["a"]
        one.follower.stop()
        (place / "b").write_text("x")
        assert two.next() == ["b"]
        assert one.looks.empty()
    finally:
        one.follower.stop()
        two.follower.stop()


def test_a_follower_gets_an_instance_when_there_is_one(
    place: Path, free: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an instance a follower looks again and again; once one is free, it looks at what is signalled only."""
    monkeypatch.setattr(following, "POLL_WITHOUT_INOTIFY", 0.02)
    followed = Followed(place)
    try:
        for _ in range(3):
            assert followed.next() is None
        free()
        until_signalled(followed, place)
    finally:
        followed.follower.stop()


def test_a_follower_without_a_watch_polls(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user's watches are used up, a follower looks again and again until it gets its own."""
    monkeypatch.setattr(following, "POLL_WITHOUT_INOTIFY", 0.02)
    with monkeypatch.context() as patch:

        def full(_self: Inotify, directory: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device", directory)

        patch.setattr(Inotify, "watch", full)
        followed = Followed(place)
        for _ in range(3):
            assert followed.next() is None
    try:
        until_signalled(followed, place)
    finally:
        followed.follower.stop()


def test_while_it_waits_for_quiet_a_follower_can_be_woken_and_stopped(place: Path) -> None:
    """A wake leads to a look at everything, and a stop to the end, also where a change was seen and more may come."""
    followed = Followed(place, quiet=3600.0)
    assert followed.next() is None
    (place / "a").write_text("x")
    assert silent(followed.looks)
    followed.follower.wake()
    assert followed.next() is None
    (place / "b").write_text("x")
    assert silent(followed.looks)
    stopping = threading.Thread(target=followed.follower.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE)
    assert not stopping.is_alive()
    assert followed.looks.empty()
