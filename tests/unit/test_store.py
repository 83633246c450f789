"""The store: what it carries over, what it refuses, and what it survives."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netacct.accounting.encoding import Checkpoint, decode, encode
from netacct.accounting.exposure import Exposure
from netacct.accounting.ledger import Ledger
from netacct.accounting.store import DATABASE, LATEST, Place, Store
from netacct.errors import StoreError
from netacct.model import (
    UNBOUNDED,
    WHOLE,
    CounterKey,
    Direction,
    Lease,
    Pod,
    Reading,
    Scope,
    Snapshot,
    cgroup_key,
    pack,
)

POD = Pod("team-a", "train-0", "uid-a", "Job", "train", (("experiment", "x"), ("owner", "schrödinger")))
HERE = Place("boot-1", "4:4026531840")


def snapshot(at: float, total: int) -> Snapshot:
    """A reading with something of every kind in it."""
    return Snapshot(
        at,
        (
            Reading(
                CounterKey(4, Scope.POD, Direction.RECEIVE, "internet"),
                2**63 + 7,
                {pack("10.0.0.1"): (total, 1), pack("10.0.0.2"): (total, 2), pack("10.0.0.3"): (0, 0)},
            ),
            Reading(CounterKey(6, Scope.POD, Direction.TRANSMIT, "pod"), 9, {pack("fd00::1"): (2**64 - 1, 5)}),
            Reading(CounterKey(4, Scope.HOST, Direction.TRANSMIT, "tunnel"), 3, {WHOLE: (total, 1)}),
            Reading(CounterKey(4, Scope.REST, Direction.TRANSMIT, "node"), 0, {}),
            Reading(CounterKey(6, Scope.HOST_POD, Direction.RECEIVE, "node"), 4, {cgroup_key(2**40 + 7): (70, 1)}),
        ),
    )


def checkpoint(total: int = 1000) -> Checkpoint:
    """A state in which every part of a state is in use."""
    ledger = Ledger()
    ledger.baseline(snapshot(10.0, 0), 10.0)
    ledger.settle(snapshot(15.0, 10), [Lease(pack("10.0.0.1"), POD, "", 3.0, 4.0, 15.0)], 15.0)
    open_lease = Lease(pack("10.0.0.1"), POD, "box", UNBOUNDED, 15.0, sources=frozenset({"file", "cri"}))
    ledger.settle(snapshot(20.0, total), [open_lease], 20.0)
    exposure = Exposure(zero_first=0.0)
    exposure.view(ledger.totals, ledger.alive(20.0), 20.0)
    exposure.view(dict(list(ledger.totals.items())[:2]), ledger.alive(21.0), 21.0)
    return Checkpoint(ledger.state(), (open_lease,), exposure.state())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A state directory with a few checkpoints behind it."""
    store = Store(tmp_path, HERE)
    assert store.load().reason == "new"
    for total in (100, 500, 1000):
        store.save(checkpoint(total))
    return tmp_path


def test_a_checkpoint_comes_back_as_it_was(saved: Path) -> None:
    """Every part of the last state is read as it was written, and no earlier state is."""
    assert Store(saved, HERE).load().checkpoint == checkpoint(1000)


def test_totals_beyond_64_bits_come_back(tmp_path: Path) -> None:
    """A counter that somebody set to its end, and set back, does not keep the agent from storing its totals."""
    ledger = Ledger()
    ledger.baseline(snapshot(10.0, 0), 10.0)
    for at, value in ((20.0, 2**64 - 1), (30.0, 5), (40.0, 2**64 - 1)):
        ledger.settle(snapshot(at, value), [Lease(pack("10.0.0.1"), POD, "box", UNBOUNDED, 5.0)], at)
    state = Checkpoint(ledger.state(), (), Exposure().state())
    assert max(count.bytes for count in state.ledger.series.totals.values()) > 2**64
    Store(tmp_path, HERE).save(state)
    assert Store(tmp_path, HERE).load().checkpoint == state


def test_the_state_is_the_owners_alone(saved: Path) -> None:
    """Nobody else may read who talks how much: directory 0700, files 0600, whatever the umask."""
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()} == {
        DATABASE: 0o600,
        LATEST: 0o600,
    }


def test_a_directory_that_is_not_ours_alone_keeps_its_mode(tmp_path: Path) -> None:
    """With `state_dir: /run` by mistake, all of the node's other programs still get at what is theirs."""
    tmp_path.joinpath("dbus").mkdir()
    tmp_path.chmod(0o755)
    store = Store(tmp_path, HERE)
    store.load()
    store.save(checkpoint())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / DATABASE).stat().st_mode) == 0o600


def test_a_directory_that_is_ours_alone_is_closed_to_others(saved: Path) -> None:
    """A directory that somebody made open, or opened since, is the owner's alone again with the next checkpoint."""
    for name in ("agent.lock", "control.sock"):
        saved.joinpath(name).touch()
    saved.chmod(0o755)
    Store(saved, HERE).load()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [b"no database", b""])
def test_a_file_that_is_damaged_meanwhile_is_made_anew(saved: Path, damage: bytes) -> None:
    """What a running process knows replaces a file in which nothing is left to use, so that a restart goes on."""
    store = Store(saved, HERE)
    store.load()
    (saved / DATABASE).write_bytes(damage * 1000)
    store.save(checkpoint(2000))
    store.save(checkpoint(3000))
    assert Store(saved, HERE).load().checkpoint == checkpoint(3000)


def test_a_file_that_is_cut_meanwhile_is_made_anew(saved: Path) -> None:
    """The same where a part of it is left."""
    store = Store(saved, HERE)
    store.load()
    os.truncate(saved / DATABASE, 5000)
    store.save(checkpoint(2000))
    assert Store(saved, HERE).load().checkpoint == checkpoint(2000)


def test_a_successor_continues_the_numbering(saved: Path) -> None:
    """A process that loaded a state can save, and the next one can load that."""
    second = Store(saved, HERE)
    second.load()
    second.save(checkpoint(2000))
    assert Store(saved, HERE).load().checkpoint == checkpoint(2000)


def rewrite(saved: Path, statement: str) -> None:
    """Change the database behind the store's back."""
    connection = sqlite3.connect(saved / DATABASE)
    connection.execute(statement)
    connection.commit()
    connection.close()


def copy_in(saved: Path) -> None:
    """Replace the database by a copy of itself."""
    shutil.copy2(saved / DATABASE, saved / "copy")
    (saved / "copy").replace(saved / DATABASE)


def roll_back(saved: Path) -> None:
    """Restore an earlier database in place, as `cp` from a backup does."""
    old = (saved / DATABASE).read_bytes()
    store = Store(saved, HERE)
    store.load()
    store.save(checkpoint(3000))
    (saved / DATABASE).write_bytes(old)


def truncate(saved: Path) -> None:
    """Cut the database in half."""
    data = (saved / DATABASE).read_bytes()
    (saved / DATABASE).write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("row", ["set/0/counts", "totals/counts", "tallies/counts"])
def test_numbers_that_are_missing_make_a_damaged_state(row: str) -> None:
    """A row with fewer numbers than there are names for is told as damage, which a store puts aside."""
    rows = dict(encode(checkpoint()))
    rows[row] = b""
    with pytest.raises((ValueError, LookupError)):
        decode(rows)


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("cloned", copy_in),
    ("rolled back", roll_back),
    ("foreign", lambda saved: (saved / LATEST).unlink()),
    ("foreign", lambda saved: (saved / LATEST).write_text("half")),
    ("foreign", lambda saved: (saved / LATEST).write_text(f"{'0' * 32} {3:020d}\n")),
    ("corrupt", truncate),
    ("corrupt", lambda saved: (saved / DATABASE).write_bytes(b"not a database, but long enough to be one" * 100)),
    ("corrupt", lambda saved: rewrite(saved, "UPDATE state SET value = x'00' WHERE name = 'set/0/counts'")),
    ("corrupt", lambda saved: rewrite(saved, "UPDATE state SET value = '5' WHERE name = 'number'")),
    ("corrupt", lambda saved: rewrite(saved, "DELETE FROM state WHERE name = 'leases'")),
    ("corrupt", lambda saved: rewrite(saved, "ALTER TABLE state RENAME COLUMN value TO other")),
    ("wrong version", lambda saved: rewrite(saved, "UPDATE state SET value = '0' WHERE name = 'schema'")),
]


@pytest.mark.parametrize(("reason", "damage"), DAMAGE)
def test_a_state_that_is_not_provably_the_latest_is_put_aside(
    saved: Path, reason: str, damage: Callable[[Path], object]
) -> None:
    """Copied, rolled back, foreign or damaged: the store says which, keeps the file for a look, and begins anew."""
    damage(saved)
    store = Store(saved, HERE)
    loaded = store.load()
    assert loaded.checkpoint is None
    assert loaded.reason.startswith(reason)
    assert (saved / f"{DATABASE}.unusable").exists()
    assert Store(saved, HERE).load().reason == "new"
    store.save(checkpoint(7))
    assert Store(saved, HERE).load().checkpoint == checkpoint(7)


@pytest.mark.parametrize(
    ("place", "reason"),
    [(Place("boot-2", HERE.netns), "other boot"), (Place(HERE.boot, "4:1"), "other network namespace")],
)
def test_a_state_of_another_place_is_put_aside(saved: Path, place: Place, reason: str) -> None:
    """Counters of another boot or network namespace are other counters."""
    assert Store(saved, place).load().reason == reason


def test_the_place_of_this_process_is_the_kernels_word() -> None:
    """Boot id and namespace come from where the kernel shows them, the same each time."""
    assert Place.here() == Place.here()
    assert len(Place.here().boot) == 36
    assert Place.here().netns.endswith(f":{Path('/proc/self/ns/net').stat().st_ino}")


def test_a_caller_can_put_aside_what_does_not_fit_the_kernel(saved: Path) -> None:
    """After `discard` the store begins anew, as after a damaged file."""
    store = Store(saved, HERE)
    store.load()
    assert store.discard("ahead of the kernel").reason == "ahead of the kernel"
    assert Store(saved, HERE).load().reason == "new"


def test_a_journal_of_a_state_put_aside_does_not_harm_the_next(saved: Path) -> None:
    """A leftover journal goes with its database: it would be rolled back into the next one."""
    (saved / f"{DATABASE}-journal").write_bytes(b"old")
    store = Store(saved, HERE)
    store.discard("test")
    assert not (saved / f"{DATABASE}-journal").exists()


def test_a_locked_database_fails_the_save_and_keeps_the_state(saved: Path) -> None:
    """Somebody who reads the file in a transaction delays a save, and breaks nothing."""
    store = Store(saved, HERE)
    store.load()
    other = sqlite3.connect(saved / DATABASE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked"):
        store.save(checkpoint(4000))
    with pytest.raises(StoreError, match="locked"):
        Store(saved, HERE).load()
    other.execute("ROLLBACK")
    other.close()
    assert Store(saved, HERE).load().checkpoint == checkpoint(1000)
    store.save(checkpoint(4000))
    assert Store(saved, HERE).load().checkpoint == checkpoint(4000)


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    """A file where the directory should be is reported as the store's own error, with the path."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "state", HERE)
    with pytest.raises(StoreError, match="file/state"):
        store.load()
    with pytest.raises(StoreError, match="file/state"):
        store.save(checkpoint())


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """A link in place of the database is refused, and its target is left alone."""
    target = tmp_path / "target"
    target.touch()
    directory = tmp_path / "state"
    directory.mkdir()
    (directory / DATABASE).symlink_to(target)
    with pytest.raises(StoreError):
        Store(directory, HERE).save(checkpoint())
    assert target.read_bytes() == b""


def test_a_process_that_dies_after_its_first_commit_leaves_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file is there before the first transaction, so a first checkpoint is never taken for a foreign one."""
    write = os.pwrite

    def only_before_the_database(descriptor: int, data: bytes, offset: int) -> int:
        if (tmp_path / DATABASE).exists():
            raise OSError("died here")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", only_before_the_database)
    with pytest.raises(StoreError, match="died here"):
        Store(tmp_path, HERE).save(checkpoint())
    assert Store(tmp_path, HERE).load().checkpoint == checkpoint()


def test_a_deleted_state_comes_back_with_the_next_save(saved: Path) -> None:
    """Somebody who empties the directory under a running agent loses one checkpoint's worth of safety."""
    store = Store(saved, HERE)
    store.load()
    shutil.rmtree(saved)
    store.save(checkpoint(4000))
    assert Store(saved, HERE).load().checkpoint == checkpoint(4000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_fails_the_save_and_keeps_the_state(small_disk: Path) -> None:
    """A disk that fills up costs no state: the old one stays, and saving works again once there is room."""
    store = Store(small_disk, HERE)
    store.save(checkpoint(1))
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(bytes(512 * 1024))
    with pytest.raises(StoreError):
        store.save(checkpoint(2))
    assert not (small_disk / f"{DATABASE}.unusable").exists()
    ballast.unlink()
    assert Store(small_disk, HERE).load().checkpoint == checkpoint(1)
    store.save(checkpoint(3))
    assert Store(small_disk, HERE).load().checkpoint == checkpoint(3)


def test_a_read_only_disk_fails_the_save_and_keeps_the_state(small_disk: Path) -> None:
    """A file system that turned read-only is reported, and the state in it is not put aside."""
    store = Store(small_disk, HERE)
    store.save(checkpoint(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError):
        store.save(checkpoint(2))
    with pytest.raises(StoreError):
        Store(small_disk, HERE).load()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert Store(small_disk, HERE).load().checkpoint == checkpoint(1)


WRITER = """
import sys
from pathlib import Path
from netacct.accounting.store import Place, Store
from netacct.accounting.ledger import Ledger
from netacct.accounting.exposure import ExposureState
from netacct.accounting.encoding import Checkpoint
from netacct.model import CounterKey, Direction, Lease, Pod, Reading, Scope, Snapshot

store = Store(Path(sys.argv[1]), Place("boot-1", "4:4026531840"))
loaded = store.load().checkpoint
ledger = Ledger(loaded.ledger if loaded else None)
key = CounterKey(4, Scope.POD, Direction.RECEIVE, "internet")
number = max(int(ledger.at), 1) if loaded else 1
while True:
    number += 1
    leases = [Lease(bytes([10, 0, 0, n]), Pod("team", f"pod-{n}", f"u{n}"), "", 0.5, 0.6) for n in range(200)]
    counts = {lease.ip: (number * 100, number) for lease in leases}
    ledger.settle(Snapshot(float(number), (Reading(key, 1, counts),)), leases, float(number))
    print(number, "begins", flush=True)
    store.save(Checkpoint(ledger.state(), tuple(leases), ExposureState({})))
    print(number, "done", flush=True)
"""


def test_a_killed_process_leaves_its_last_or_its_last_but_one_state(tmp_path: Path) -> None:
    """Killed at any moment, a writer leaves a whole state: the last that it finished, or the one it was writing."""
    luck = random.Random()
    finished = 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(luck.uniform(0.0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.stdout.close()
        child.wait()
        done = [int(line.split()[0]) for line in lines if line.rstrip().endswith("done")]
        begun = [int(line.split()[0]) for line in lines if line.rstrip().endswith("begins")]
        finished = done[-1] if done else finished
        loaded = Store(tmp_path, HERE).load()
        if loaded.checkpoint is None:
            assert (loaded.reason, finished) == ("new", 0)
            continue
        state = loaded.checkpoint.ledger
        assert finished <= state.at <= begun[-1]
        assert {count.bytes for key, count in state.series.totals.items() if key.labels[0] == "team"} <= {
            int(state.at) * 100,
            int(state.at) * 100 * 200,
        }
        finished = int(state.at)


def test_values_are_plain(tmp_path: Path) -> None:
    """The file is an ordinary SQLite table of text and blobs that other tools can read."""
    Store(tmp_path, HERE).save(dataclasses.replace(checkpoint(), leases=()))
    connection = sqlite3.connect(tmp_path / DATABASE)
    kinds = dict(connection.execute("SELECT name, typeof(value) FROM state"))
    connection.close()
    assert set(kinds.values()) == {"text", "blob"}
    assert kinds["boot"] == "text"
    assert kinds["set/0/counts"] == "blob"
