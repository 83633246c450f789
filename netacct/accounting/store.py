"""The file that carries the books from one process to the next, within one boot of one machine.

Kernel counters outlive the agent; what it knew of them must too, and must be *the* last that it knew: totals that
continue from an older or a foreign state would bill bytes twice. So a state is used only where it is provably the
latest of this place, and otherwise put aside, and counting begins anew from the kernel's present values.

    netacct.db       SQLite, one table; one transaction per checkpoint, the whole state each time
    netacct.latest   the instance and the number of the last checkpoint, in plain text, written after each commit
    *.unusable       the last state that was put aside

What `load` proves, and how:

    other boot       the kernel's boot id is in the file
    other netns      so are device and inode of the network namespace: its counters are other counters
    cloned           and device and inode of the database file itself, which a copy does not have
    rolled back      the number in `netacct.latest` is never larger than the database's own (the process may die
                     between the two writes, which leaves it smaller)
    foreign          both files name the same random instance
    corrupt          SQLite's own checks, and a checksum over all rows

Not proved: that nobody restored both files, in place and within one boot. `Ledger.contradicts` is a second net, for
what got past these: a state that is ahead of the kernel.

Commits are atomic against a killed process (rollback journal). They are not synced to a disk, because a state never
outlives a boot: under /run it is memory anyway. Every save opens the file anew, so that a file which somebody deleted
or damaged comes back with the next checkpoint. Worker thread only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from netacct.accounting.encoding import Checkpoint, Row, decode, encode
from netacct.errors import StoreError

SCHEMA = "2"
DATABASE = "netacct.db"
LATEST = "netacct.latest"
BUSY_SECONDS = 0.2

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETNS = Path("/proc/self/ns/net")

_DAMAGE = (sqlite3.DatabaseError, ValueError, LookupError, TypeError, AttributeError)
"""What reading a damaged file can raise."""

_NOT_THE_CONTENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""Primary result codes that say nothing about what is in the file."""

_OUR_FILES = re.compile(r"netacct\..*|accounts\..*|agent\.lock|control\.sock|lists")
"""What a directory that is netacct's alone may hold."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a store held: a checkpoint, or the reason why there is none to use (`new` where there never was one)."""

    checkpoint: Checkpoint | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where counters live: one boot of one kernel, and a network namespace (device and inode, as text) in it."""

    boot: str
    netns: str

    @classmethod
    def here(cls) -> Place:
        """Of this process. Boot id: random(4); namespace identity: namespaces(7), "The /proc/pid/ns/ directory"."""
        return cls(_BOOT_ID.read_text(encoding="ascii").strip(), _identity(_NETNS))


class _UnusableError(Exception):
    """Why a state must not be used."""


class Store:
    """The state directory. `load` once, then `save` as often as needed; both raise `StoreError`, and nothing else.

    After a failed `save` the file holds the state before; call again later.
    """

    def __init__(self, directory: Path, place: Place | None = None) -> None:
        self._directory = directory
        self._place = place or Place.here()
        self._database = directory / DATABASE
        self._latest = directory / LATEST
        self._instance = secrets.token_hex(16)
        self._number = 0

    def load(self) -> Loaded:
        """The last checkpoint, where it is provably that. Otherwise its file is put aside, and a new state begins."""
        with self._errors("read"):
            self._prepare()
            if not self._database.exists():
                return Loaded(None, "new")
            try:
                rows = self._read()
                if not rows:
                    return Loaded(None, "new")
                self._prove(rows)
                checkpoint = decode(rows)
            except _UnusableError as error:
                return self._put_aside(str(error))
            except _DAMAGE as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NOT_THE_CONTENT:
                    raise
                return self._put_aside(f"corrupt: {error!r}")
            self._instance, self._number = str(rows["instance"]), int(rows["number"])
            return Loaded(checkpoint)

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the state by this one, in one transaction."""
        with self._errors("write"):
            self._prepare()
            number = self._number + 1
            rows = [
                *encode(checkpoint),
                ("schema", SCHEMA),
                ("boot", self._place.boot),
                ("netns", self._place.netns),
                ("instance", self._instance),
                ("number", str(number)),
            ]
            if number == 1:
                self._note_latest()  # a state whose second file is missing would count as foreign
            self._write(rows)
            self._number = number
            self._note_latest()

    def discard(self, reason: str) -> Loaded:
        """Put aside what `load` returned, because the caller found that it does not fit the kernel."""
        with self._errors("put aside"):
            return self._put_aside(reason)

    @property
    def place(self) -> Place:
        """Where the counters of this state live."""
        return self._place

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot {action} the state in {self._directory}: {error}") from error

    def _prepare(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Somebody who writes `state_dir: /run` must not find the node closed to everybody else; doctor tells of that.
        is_open = self._directory.stat().st_mode & 0o077
        if is_open and all(_OUR_FILES.fullmatch(path.name) for path in self._directory.iterdir()):
            self._directory.chmod(0o700)

    def _connect(self) -> sqlite3.Connection:
        # SQLite would make the file readable for all; it gives its journal the mode of the file.
        os.close(os.open(self._database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(self._database, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def _read(self) -> dict[str, str | bytes]:
        with contextlib.closing(self._connect()) as connection:
            # Without the table, the first checkpoint was never committed.
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                return {}
            return dict(connection.execute("SELECT name, value FROM state").fetchall())

    def _write(self, rows: list[Row]) -> None:
        try:
            self._commit(rows)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            self._move_away(f"{DATABASE}-journal", DATABASE)
            self._commit(rows)

    def _commit(self, rows: list[Row]) -> None:
        with contextlib.closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            # Asked for under the lock: by now the file is there and nobody replaces it.
            rows = [*rows, ("file", _identity(self._database))]
            connection.execute("CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value)")
            connection.execute("DELETE FROM state")
            connection.executemany("INSERT INTO state VALUES (?, ?)", [*rows, ("checksum", _checksum(rows))])
            connection.execute("COMMIT")

    def _prove(self, rows: dict[str, str | bytes]) -> None:
        if rows.get("schema") != SCHEMA:
            raise _UnusableError(f"wrong version: {rows.get('schema')!r}, this is {SCHEMA!r}")
        if rows.pop("checksum") != _checksum(rows.items()):
            raise _UnusableError("corrupt: the checksum is another one")
        if rows["boot"] != self._place.boot:
            raise _UnusableError("other boot")
        if rows["netns"] != self._place.netns:
            raise _UnusableError("other network namespace")
        if rows["file"] != _identity(self._database):
            raise _UnusableError("cloned: the file is a copy")
        try:
            instance, number = self._latest.read_text(encoding="ascii").split()
        except (FileNotFoundError, ValueError):
            raise _UnusableError(f"foreign: {LATEST} is missing or damaged") from None
        if instance != rows["instance"]:
            raise _UnusableError(f"foreign: {LATEST} belongs to another state")
        if int(number) > int(rows["number"]):
            raise _UnusableError(f"rolled back: checkpoint {rows['number']!s} of {number}")

    def _note_latest(self) -> None:
        # One small write over the old text, of the same length: it needs no space that is not there already, and
        # a reader sees the old or the new one.
        text = f"{self._instance} {self._number:020d}\n".encode("ascii")
        descriptor = os.open(self._latest, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(descriptor, text, 0)
        finally:
            os.close(descriptor)

    def _put_aside(self, reason: str) -> Loaded:
        # The journal goes first: left alone, it would be rolled back into the next database of this name.
        self._move_away(f"{DATABASE}-journal", LATEST, DATABASE)
        self._instance, self._number = secrets.token_hex(16), 0
        return Loaded(None, reason)

    def _move_away(self, *names: str) -> None:
        for name in names:
            path = self._directory / name
            with contextlib.suppress(FileNotFoundError):
                path.replace(path.with_name(f"{name}.unusable"))


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _checksum(rows: Iterable[Row]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(rows):
        data = value.encode() if isinstance(value, str) else value
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
