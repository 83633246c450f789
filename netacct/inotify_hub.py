"""One inotify instance for the whole process, however many follow files and directories.

The instances of a node's root (fs.inotify.max_user_instances, 128 by default) are shared with the kubelet, containerd,
systemd and every agent, and running out of them is well known in the field.

The `Hub` owns the instance, the thread that alone reads it, and the table of who holds which watch; all three live from
the first `Share` to the end of the last. A share belongs to one follower, which takes its events in a thread of its own
when `fd` can be read. Were all to wait for the instance itself, each event would wake them all, and be dealt later.

The kernel gives one number for one inode however often it is watched, so watches are counted: all have the same mask,
and a watch ends with its last holder, or when the kernel says that its directory is gone. While a follower asks for a
watch, of which the number is not known yet, it gets all events, and no watch is removed. It may well ignore events of
watches that it does not know.

Two locks: `_life` orders beginnings and ends of the instance; `_lock` is for the tables and for what shares have
pending, and is the only one that the reading thread takes, so that its end can be waited for under the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from netacct import log
from netacct.inotify import Event, Inotify
from netacct.sleeper import Sleeper, Why

LOST = Event(-1, "", created=False)
"""Events were lost, or could not be had until now: everything is to be looked at."""

PENDING = 4096
"""Different events that wait for one follower; with more of them it gets `LOST` instead."""

_NONE = "no inotify instance, polling"

_REPEAT = 600.0
"""Seconds between warnings of the same trouble."""

_PAUSE = 1.0
"""Seconds after a failed read of the instance."""

_LONG = 3600.0


class Hub:
    """Hands the events of one inotify instance to all who share it. Everything here may be called from any thread."""

    def __init__(self) -> None:
        self._life = threading.Lock()
        self._lock = threading.Lock()
        self._shares: set[Share] = set()
        self._holders: dict[int, set[Share]] = {}
        self._unheld: set[int] = set()
        self._joining: set[Share] = set()
        self._inotify: Inotify | None = None
        self._reader = Sleeper("inotify")
        self._log = log.get()
        self._repeats = log.Repeats(_REPEAT)
        self._lacking = False

    def share(self) -> Share:
        """A new share; the first one makes the instance, if the kernel has one left."""
        with self._life:
            made = Share(self)
            with self._lock:
                self._shares.add(made)
            self._open(made)
            return made

    def ready(self, share: Share) -> bool:
        """See `Share.ready`."""
        if self._inotify is not None:
            return True
        with self._life:
            return self._open(share)

    def watch(self, share: Share, directory: str) -> int:
        """See `Share.watch`."""
        with self._lock:
            inotify = self._inotify
            assert inotify is not None, "not ready"
            self._joining.add(share)
        number = None
        try:
            number = inotify.watch(directory)  # without the lock: this can hang, as on a file server that is away
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self._warn("no inotify watch left, polling", error)
            raise
        else:
            return number
        finally:
            with self._lock:
                if number is not None:
                    self._holders.setdefault(number, set()).add(share)
                    self._unheld.discard(number)
                self._joining.discard(share)
                self._free()

    def unwatch(self, share: Share, number: int) -> None:
        """See `Share.unwatch`."""
        with self._lock:
            self._give_up(share, number)

    def take(self, share: Share) -> list[Event]:
        """See `Share.events`."""
        with self._lock:
            found = list(share.pending)
            share.pending.clear()
            if not found and share.rung:  # not before the events are seen to: the call would give the interpreter away
                os.eventfd_read(share.fd)
                share.rung = False
            return found

    def leave(self, share: Share) -> None:
        """See `Share.close`."""
        with self._life:
            with self._lock:
                if share not in self._shares:
                    return
                self._shares.remove(share)
                for number in [number for number, holders in self._holders.items() if share in holders]:
                    self._give_up(share, number)
            os.close(share.fd)
            if not self._shares:
                self._close()

    def _open(self, by: Share) -> bool:
        """Make the instance and its thread, unless they are there; those who had to do without are told."""
        if self._inotify is not None:
            return True
        try:
            made = Inotify()
            with contextlib.ExitStack() as undo:
                undo.callback(made.close)
                self._reader.start(lambda: self._read(made))
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # the latter where no thread can be started
            self._warn(_NONE, error)
            self._lacking = True
            return False
        if self._lacking:
            self._lacking = False
            self._repeats.forget(_NONE)
            self._log.info("inotify instance got, no more polling")
        with self._lock:
            self._inotify = made
            for share in self._shares - {by}:
                _put(share, LOST)
        return True

    def _close(self) -> None:
        if self._inotify is not None:
            self._reader.stop()
            self._inotify.close()
            self._inotify = None
        self._unheld.clear()
        self._repeats = log.Repeats(_REPEAT)
        self._lacking = False

    def _read(self, inotify: Inotify) -> None:
        """What the thread does."""
        while (why := self._reader.sleep(_LONG, inotify.fd)) is not Why.STOP:
            if why is not Why.READABLE:
                continue
            try:
                self._deal(inotify.events())
            except OSError:
                self._log.exception("reading inotify failed")
                self._deal([LOST])
                self._reader.sleep(_PAUSE)

    def _deal(self, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                to = self._shares if event.watch < 0 else self._holders.get(event.watch, set()) | self._joining
                for share in to:
                    _put(share, event)
                if event.gone:
                    self._holders.pop(event.watch, None)
                    self._unheld.discard(event.watch)

    def _give_up(self, share: Share, number: int) -> None:
        holders = self._holders.get(number)
        if holders is not None:
            holders.discard(share)
            if not holders:
                del self._holders[number]
                self._unheld.add(number)
                self._free()

    def _free(self) -> None:
        """Remove the watches that nobody holds, unless somebody is about to hold one of them."""
        if self._inotify is not None and not self._joining:
            for number in self._unheld:
                self._inotify.unwatch(number)
            self._unheld.clear()

    def _warn(self, what: str, error: Exception) -> None:
        if self._repeats.due(what):
            self._log.warning(what, error=str(error))


class Share:
    """One follower's part of a hub; as an inotify instance of its own would be. Made by `Hub.share`.

    Attributes:
        fd: can be read (poll(2)) while events may be queued, until `events` gave none.
        rung: whether `fd` can be read; this and the next are the hub's own affair.
        pending: the queued events, oldest first.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.rung = False
        self.pending: dict[Event, None] = {}

    def ready(self) -> bool:
        """Whether there is an instance; where there was none, it is tried to get one. Stays True until `close`."""
        return self._hub.ready(self)

    def watch(self, directory: str) -> int:
        """Watch a directory, once `ready`; number and errors are those of `Inotify.watch`."""
        return self._hub.watch(self, directory)

    def unwatch(self, number: int) -> None:
        """Forget a watch; one that the kernel dropped is no error. Events that are queued already may still come."""
        self._hub.unwatch(self, number)

    def events(self) -> list[Event]:
        """All events that are queued now, oldest first, equal ones once; never blocks.

        An event of before a directory was watched is possible, where somebody else had watched it. `LOST` comes after
        an overflow, and when an instance was got at last.
        """
        return self._hub.take(self)

    def close(self) -> None:
        """Give up all watches; with the last share, the instance ends. Idempotent."""
        self._hub.leave(self)


def _put(share: Share, event: Event) -> None:
    """Queue an event; the hub's lock is held."""
    if len(share.pending) >= PENDING:
        share.pending.clear()
        share.pending[LOST] = None
    share.pending[event] = None
    if not share.rung:
        share.rung = True
        os.eventfd_write(share.fd, 1)


SHARED = Hub()
"""That of the process."""
