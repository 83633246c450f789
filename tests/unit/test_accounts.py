"""Accounts: the record and its line, the files that they go to, and what becomes of them when something dies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct import config
from netacct.accounting import accounts_file
from netacct.accounting.accounts import Account, Origin, State, account, decode, encode
from netacct.accounting.accounts_file import LOCK_NAME, NAME, OPEN_NAME, AccountsFile
from netacct.accounting.accounts_read import read_directory, read_files
from netacct.accounting.closing import MOST_UNWRITTEN, Closing
from netacct.accounting.store import Place, Store
from netacct.accounting.tallies import Tallies, Tally
from netacct.books import Books
from netacct.identity.source import Update
from netacct.model import Count, CounterKey, Direction, Lease, Observation, Pod, Reading, Scope, Snapshot, pack

POD = Pod("team-a", "train-0", "uid-a", "Job", "train", (("experiment", "schrödinger"),))
LEASE = Lease(pack("10.244.1.10"), POD, "box", 5.0, 10.0, 70.5)
KEY = CounterKey(4, Scope.POD, Direction.RECEIVE, "internet")
ORIGIN = Origin("worker-3", "boot-1")
COUNTS = {(Direction.RECEIVE, "internet"): Count(2**63, 7), (Direction.TRANSMIT, "pod"): Count(0, 0)}


def to_wall(at: float) -> float:
    """A wall clock that began at boot, at 2025-05-09T12:00:00Z."""
    return 1746792000.0 + at


def record(number: int = 0, state: State = State.CLOSED, size: int = 100) -> Account:
    """An account of its own."""
    lease = dataclasses.replace(LEASE, opened=10.0 + number / 8)
    counts = {(Direction.RECEIVE, "internet"): Count(size, 1)}
    return account(lease, Tally(lease.opened, counts), 70.5, state, ORIGIN, to_wall)


def lines(*numbers: int) -> list[str]:
    """The lines of some accounts."""
    return [encode(record(number)) for number in numbers]


def read(directory: Path, *, with_open: bool = False) -> list[Account]:
    """All accounts of a directory, in which nothing is wrong."""
    return list(read_directory(directory, pytest.fail, with_open=with_open))


def test_a_record_has_every_field_of_the_lease() -> None:
    """The line says whose it is, from when to when in UTC, and bytes and packets per direction and class."""
    made = account(LEASE, Tally(10.0, COUNTS), 70.5, State.CLOSED, ORIGIN, to_wall)
    assert json.loads(encode(made)) == {
        "id": made.id,
        "state": "closed",
        "node": "worker-3",
        "namespace": "team-a",
        "pod": "train-0",
        "uid": "uid-a",
        "workload_kind": "Job",
        "workload": "train",
        "labels": {"experiment": "schrödinger"},
        "ip": "10.244.1.10",
        "sandbox": "box",
        "start": "2025-05-09T12:00:10.000Z",
        "end": "2025-05-09T12:01:10.500Z",
        "seconds": 60.5,
        "receive": {"internet": {"bytes": 2**63, "packets": 7}},
        "transmit": {},
    }


names = st.text(st.characters(), max_size=8)  # lone surrogates too, which JSON can carry and UTF-8 cannot
flows = st.tuples(st.sampled_from(list(Direction)), names)
counts = st.builds(Count, st.integers(0, 2**64), st.integers(1, 2**64))


@given(st.builds(Pod, names, names, names, names, names), st.dictionaries(flows, counts), st.integers(0, 10**6))
def test_a_line_reads_back(pod: Pod, got: dict[tuple[Direction, str], Count], at: int) -> None:
    """Whatever names and counts are, a record is one line, and the line is the record."""
    lease = dataclasses.replace(LEASE, pod=pod)
    made = account(lease, Tally(10.0, got), 10.0 + at, State.CLOSED, ORIGIN, to_wall)
    assert encode(made).isascii()
    assert "\n" not in encode(made)
    assert decode(encode(made)) == made


def damaged(**changes: object) -> str:
    """A line with other values in it."""
    return json.dumps(json.loads(lines(0)[0]) | changes)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        "7",
        lines(0)[0][:-5],
        "[" * 100000,
        damaged(pod=7),
        damaged(labels=["a"]),
        damaged(labels={"a": 1}),
        damaged(state="late"),
        damaged(end="yesterday"),
        damaged(receive={"internet": {"bytes": -1, "packets": 1}}),
        damaged(receive={"internet": {"bytes": 1.5, "packets": 1}}),
        damaged(transmit={"internet": {"bytes": 1}}),
    ],
)
def test_what_is_no_record_is_an_error(line: str) -> None:
    """A torn or foreign line raises ValueError, and nothing else."""
    with pytest.raises(ValueError, match="no account"):
        decode(line)


def test_a_field_of_a_later_release_is_no_error() -> None:
    """A reader takes a line that has more fields than it knows."""
    assert decode(damaged(colour="blue")) == record()


def test_ids_tell_tenures_apart_and_nothing_else() -> None:
    """The id depends on boot, pod, address, sandbox and opening, not on what is known or counted later."""
    tally = Tally(10.0, COUNTS)
    made = account(LEASE, tally, 70.5, State.CLOSED, ORIGIN, to_wall).id
    labelled = dataclasses.replace(LEASE, pod=dataclasses.replace(POD, workload="other", labels=()))
    assert account(labelled, Tally(10.0, {}), 90.0, State.OPEN, Origin("renamed", "boot-1"), to_wall).id == made
    others = [
        account(LEASE, tally, 70.5, State.CLOSED, Origin("worker-3", "boot-2"), to_wall),
        account(dataclasses.replace(LEASE, ip=pack("10.0.0.9")), tally, 70.5, State.CLOSED, ORIGIN, to_wall),
        account(dataclasses.replace(LEASE, sandbox="b"), tally, 70.5, State.CLOSED, ORIGIN, to_wall),
        account(dataclasses.replace(LEASE, opened=11.0), tally, 70.5, State.CLOSED, ORIGIN, to_wall),
        account(
            dataclasses.replace(LEASE, pod=dataclasses.replace(POD, uid="b")), tally, 7.0, State.CLOSED, ORIGIN, to_wall
        ),
        account(LEASE, Tally(12.0), 70.5, State.CLOSED, ORIGIN, to_wall),
    ]
    assert len({made, *(other.id for other in others)}) == 7


def test_a_renamed_tenant_has_an_account_under_each_name() -> None:
    """What a lease got under a name stays there, each part has an id and a start of its own, also of a name twice."""
    tallies, closing = Tallies(), Closing(AccountsFile(Path("unused")), ORIGIN, to_wall, None)
    lease = dataclasses.replace(LEASE, closed=None)
    for at, team in ((20.0, "team-b"), (30.0, "team-a"), (40.0, "team-b")):
        tallies.add(lease, (Direction.RECEIVE, "internet"), (int(at), 1))
        renamed = dataclasses.replace(lease, pod=dataclasses.replace(POD, namespace=team))
        closing.rename(lease, renamed, at, tallies)
        lease = renamed
    made = [decode(line) for line in closing.state().lines]
    assert [(one.namespace, one.start, one.end, *one.counts.values()) for one in made] == [
        ("team-a", to_wall(10.0), to_wall(20.0), Count(20, 1)),
        ("team-b", to_wall(20.0), to_wall(30.0), Count(30, 1)),
        ("team-a", to_wall(30.0), to_wall(40.0), Count(40, 1)),
    ]
    assert len({one.id for one in made}) == 3


def test_what_waits_for_its_file_is_bounded() -> None:
    """Where the file cannot be written for too long, the oldest records are lost, and counted."""
    closing = Closing(AccountsFile(Path("/proc/nowhere")), ORIGIN, to_wall, None)
    tallies = Tallies()
    for number in range(MOST_UNWRITTEN + 5):
        old = dataclasses.replace(LEASE, opened=float(number))
        closing.rename(old, dataclasses.replace(old, pod=dataclasses.replace(POD, name="b")), 1e6, tallies)
    assert closing.lost == 5
    assert len(closing.state().lines) == MOST_UNWRITTEN
    assert decode(closing.state().lines[0]).start == to_wall(5.0)
    with pytest.raises(OSError, match="nowhere"):
        closing.write()
    assert len(closing.state().lines) == MOST_UNWRITTEN


def test_lines_are_appended_for_the_group_to_read(tmp_path: Path) -> None:
    """Batches follow each other; the owner writes the file, the group reads it, whatever the umask."""
    directory = tmp_path / "accounts"
    before = os.umask(0o077)
    try:
        file = AccountsFile(directory)
        file.append(lines(1, 2))
        file.append(lines(3))
    finally:
        os.umask(before)
    assert (directory / NAME).read_text().splitlines() == lines(1, 2, 3)
    assert stat.S_IMODE((directory / NAME).stat().st_mode) == 0o640


def test_what_an_earlier_life_wrote_is_not_written_again(tmp_path: Path) -> None:
    """After a crash, only those of the stored records that are not in the file are appended, torn ones included."""
    AccountsFile(tmp_path).append(lines(1, 2, 3))
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-3])
    AccountsFile(tmp_path).append(lines(2, 3, 4))
    warnings: list[str] = []
    assert [one.id for one in read_directory(tmp_path, warnings.append)] == [record(n).id for n in (1, 2, 3, 4)]
    assert warnings == [f"{tmp_path / NAME}: skipped 1 line that is no account, the first is line 3"]


def test_a_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    """A record whose newline is missing is whole: it is read, and not written again."""
    AccountsFile(tmp_path).append(lines(1, 2))
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    AccountsFile(tmp_path).append(lines(2, 3))
    assert (tmp_path / NAME).read_text().splitlines() == lines(1, 2, 3)


def test_an_earlier_life_is_found_behind_a_rotation(tmp_path: Path) -> None:
    """Records that the last life wrote just before the file was rotated are not written again."""
    AccountsFile(tmp_path).append(lines(1, 2))
    (tmp_path / NAME).rename(tmp_path / f"{NAME}.1")
    AccountsFile(tmp_path).append(lines(2, 3))
    assert (tmp_path / NAME).read_text().splitlines() == lines(3)


def test_files_are_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    """However much is written, there are so many files of so many bytes, and what is lost is the oldest."""
    limit = 3 * len(lines(0)[0]) + 20
    file = AccountsFile(tmp_path, max_bytes=limit, files=4)
    for number in range(100):
        file.append(lines(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, *(f"{NAME}.{n}" for n in (1, 2, 3)), LOCK_NAME]
    assert all(path.stat().st_size <= limit for path in tmp_path.iterdir())
    kept = [one.id for one in read(tmp_path)]
    assert kept == [record(number).id for number in range(100 - len(kept), 100)]
    assert len(kept) >= 9


def test_a_gap_is_filled_before_anything_is_lost(tmp_path: Path) -> None:
    """A rotation that was cut short, or a file that somebody took away, costs no other file."""
    file = AccountsFile(tmp_path, max_bytes=10, files=4)
    for number in range(4):
        file.append(lines(number))
    (tmp_path / f"{NAME}.2").unlink()
    file.append(lines(4))
    assert [one.id for one in read(tmp_path)] == [record(number).id for number in (0, 2, 3, 4)]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in the file's place is refused: root must not write where it points."""
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        AccountsFile(tmp_path).append(lines(1))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        (NAME, lambda file: file.append(lines(1))),
        (OPEN_NAME, AccountsFile.read_open),
        (LOCK_NAME, AccountsFile.hold),
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str, use: Callable[[AccountsFile], object]) -> None:
    """Where somebody made a pipe of the file, that is an error, and no agent hangs on who reads it."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="no regular file"):
        use(AccountsFile(tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_takes_a_batch_whole_or_not_at_all(small_disk: Path) -> None:
    """What does not fit leaves no torn line behind, and goes in once there is room."""
    file = AccountsFile(small_disk)
    file.append(lines(1))
    (small_disk / "ballast").write_bytes(bytes(56 * 1024))
    with pytest.raises(OSError, match="No space"):
        file.append(lines(*range(2, 40)))
    assert (small_disk / NAME).read_text().splitlines() == lines(1)
    with pytest.raises(OSError, match="No space"):
        file.write_open(lines(*range(40)))
    (small_disk / "ballast").unlink()
    file.append(lines(*range(2, 40)))
    file.close()
    assert (small_disk / NAME).read_text().splitlines() == lines(*range(1, 40))


def test_open_leases_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """The file of open leases holds the last state only, and is gone when there is none."""
    file = AccountsFile(tmp_path)
    file.write_open(lines(1, 2))
    file.write_open(lines(3))
    assert [one.id for one in file.read_open()] == [record(3).id]
    file.write_open([])
    assert file.read_open() == []
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_each_account_is_read_once_and_the_first_record_counts(tmp_path: Path) -> None:
    """A lease that closed since its open record was written has its closed record only; repeats do not count."""
    file = AccountsFile(tmp_path)
    file.append([encode(record(1)), encode(record(2))])
    file.append([encode(record(1, State.INTERRUPTED, size=5))])
    file.write_open([encode(record(2, State.OPEN, size=5)), encode(record(3, State.OPEN))])
    assert read(tmp_path) == [record(1), record(2)]
    assert read(tmp_path, with_open=True) == [record(1), record(2), record(3, State.OPEN)]
    paths = [tmp_path / NAME, tmp_path / NAME, tmp_path / OPEN_NAME]
    assert list(read_files(paths, pytest.fail)) == read(tmp_path, with_open=True)


def test_a_reader_beside_a_busy_writer_misses_nothing(tmp_path: Path) -> None:
    """While files rotate as fast as they can, each reading has every account that was written before it began."""
    limit = 20 * len(lines(0)[0])
    file = AccountsFile(tmp_path, max_bytes=limit, files=500)
    written = 0
    ended = threading.Event()

    def write() -> None:
        nonlocal written
        while not ended.is_set() and written < 3000:
            file.append(lines(written))
            written += 1
            time.sleep(0.0005)

    file.append(lines(3000))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(15):
            before = written
            found = {one.id for one in read_directory(tmp_path, lambda _: None)}
            assert found >= {record(number).id for number in range(before)}
    finally:
        ended.set()
        writer.join()


def configured(folder: Path) -> config.Config:
    """A configuration whose accounts go into `folder`."""
    path = folder / "netacct.yaml"
    path.write_text(json.dumps({"accounts_dir": str(folder / "accounts")}))
    return config.load(str(path))


def books(folder: Path, boot: str = "boot-1") -> Books:
    """Books on what is in `folder`."""
    return Books(Store(folder / "state", Place(boot, "net")), configured(folder), ["file"])


def observe(of: Books, at: float, octets: int, *, present: bool = True) -> None:
    """A pod comes or goes when its address has so many bytes, and the change is committed and stored."""
    counted(of, at, octets)
    of.note(Update("file", (Observation("file", LEASE.ip, POD, "box", 5.0, at, present),)))
    of.commit(at)
    of.save(at)


def counted(of: Books, at: float, octets: int) -> None:
    """The kernel's counter of the pod's address stands at so many bytes."""
    of.settle(Snapshot(at, (Reading(KEY, 1, {LEASE.ip: (octets, 1)}),)), at)


def running(folder: Path) -> Books:
    """Books with one pod that got 500 bytes, 400 of which were known when the open leases were written last."""
    made = books(folder)
    made.ledger.baseline(Snapshot(1.0, (Reading(KEY, 1, {}),)), 1.0)
    observe(made, 10.0, 0)
    counted(made, 20.0, 400)
    made.finish(20.0)
    counted(made, 30.0, 500)
    made.save(30.0)
    return made


def test_a_restart_goes_on_with_open_leases(tmp_path: Path) -> None:
    """A lease that lasts over a restart of the agent has one account with all of its bytes."""
    running(tmp_path)
    after = books(tmp_path)
    counted(after, 40.0, 600)
    observe(after, 50.0, 700, present=False)
    (made,) = read(tmp_path / "accounts")
    assert (made.state, made.seconds, dict(made.counts)) == (
        State.CLOSED,
        40.0,
        {(Direction.RECEIVE, "internet"): Count(700, 1)},
    )


@pytest.mark.parametrize("loss", ["reboot", "deleted"])
def test_a_lost_state_interrupts_open_leases(tmp_path: Path, loss: str) -> None:
    """After a reboot, or without its state, an agent leaves an interrupted account of what was last written, once."""
    running(tmp_path)
    boot = "boot-2" if loss == "reboot" else "boot-1"
    for turn in range(3):
        if loss == "deleted":
            for path in (tmp_path / "state").iterdir():
                path.unlink()
        after = books(tmp_path, boot)
        assert after.resumed is (loss == "reboot" and turn > 0)
        after.save(5.0)
    (made,) = read(tmp_path / "accounts", with_open=True)
    assert (made.state, made.seconds, dict(made.counts)) == (
        State.INTERRUPTED,
        10.0,
        {(Direction.RECEIVE, "internet"): Count(400, 1)},
    )
    assert len((tmp_path / "accounts" / NAME).read_text().splitlines()) == 1


def test_an_agent_survives_accounts_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record waits over failures and a restart, the trouble is logged once, and then the record is written."""
    (tmp_path / "accounts").write_text("in the way")
    made = running(tmp_path)
    observe(made, 40.0, 500, present=False)
    for at in (50.0, 60.0):
        assert made.save(at)
    assert capsys.readouterr().out.count("cannot write accounts") == 1
    (tmp_path / "accounts").unlink()
    after = books(tmp_path)
    after.save(70.0)
    (found,) = read(tmp_path / "accounts")
    assert dict(found.counts) == {(Direction.RECEIVE, "internet"): Count(500, 1)}


WORKER = """
import json, struct, sys, time
from pathlib import Path
from netacct import config
from netacct.accounting.store import Place, Store
from netacct.books import Books
from netacct.identity.source import Update
from netacct.model import CounterKey, Direction, Observation, Pod, Reading, Scope, Snapshot

folder = Path(sys.argv[1])
kernel = (folder / "kernel").open("r+b", buffering=0)
key = CounterKey(4, Scope.POD, Direction.RECEIVE, "internet")
ips = [bytes([10, 0, 0, n]) for n in range(8)]
books = Books(Store(folder / "state", Place("boot", "net")), config.load(str(folder / "netacct.yaml")), ["file"])

def read():
    kernel.seek(0)
    counts = struct.unpack("16Q", kernel.read(128))
    return Snapshot(time.monotonic(), (Reading(key, 1, dict(zip(ips, zip(counts[::2], counts[1::2])))),))

if not books.resumed:
    first = read()
    books.ledger.baseline(first, first.at)
    books.save(first.at)
held = {lease.ip: lease for lease in books.leases.open_leases()}
print("ready", flush=True)
number = 0
while True:
    number += 1
    n = number % 8
    kernel.seek(16 * n)
    was = struct.unpack("2Q", kernel.read(16))
    kernel.seek(16 * n)
    kernel.write(struct.pack("2Q", was[0] + 1000 + number, was[1] + 1))
    now, lease = time.monotonic(), held.pop(ips[n], None)
    pod = lease.pod if lease else Pod(f"team-{n % 2}", f"pod-{n}", f"{now}")
    seen = Observation("file", ips[n], pod, "", now if lease is None else lease.created, now, lease is None)
    books.note(Update("file", (seen,)))
    shot = read()
    books.settle(shot, shot.at)
    books.commit(shot.at)
    books.save(shot.at)
    held = {lease.ip: lease for lease in books.leases.open_leases()}
"""


HOLDER = """
import sys
from pathlib import Path
from netacct.accounting.accounts_file import AccountsFile

file = AccountsFile(Path(sys.argv[1]))
file.write_open(sys.stdin.readline().splitlines())
print("held", flush=True)
sys.stdin.readline()
"""


def test_accounts_of_another_running_agent_are_left_alone(tmp_path: Path) -> None:
    """Where another process writes accounts, its open leases are no interrupted ones, and what closes here waits."""
    accounts = tmp_path / "accounts"
    command = [sys.executable, "-c", HOLDER, str(accounts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(encode(record(state=State.OPEN)) + "\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "held\n"
        theirs = (accounts / OPEN_NAME).read_text()
        mine = books(tmp_path)
        observe(mine, 10.0, 0)
        observe(mine, 20.0, 500, present=False)
        assert sorted(path.name for path in accounts.iterdir()) == [LOCK_NAME, OPEN_NAME]
        assert (accounts / OPEN_NAME).read_text() == theirs
        holder.stdin.close()
        holder.wait()
    mine.save(30.0)
    assert [one.state for one in read(accounts)] == [State.CLOSED]


def test_a_killed_agent_loses_and_doubles_no_account(tmp_path: Path) -> None:
    """Killed at any moment, many times, books and accounts together have what the kernel counted, each lease once."""
    configured(tmp_path)
    (tmp_path / "kernel").write_bytes(bytes(128))
    file = tmp_path / "accounts" / NAME
    for turn in itertools.count():
        if turn >= 12 and len(file.read_text().splitlines()) > 12:  # a slow machine takes more turns
            break
        child = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline()
        time.sleep(0.013 * turn)
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()
    after = Books(Store(tmp_path / "state", Place("boot", "net")), configured(tmp_path), ["file"])
    at = time.monotonic()
    counts = struct.unpack("16Q", (tmp_path / "kernel").read_bytes())
    counters = {bytes([10, 0, 0, n]): (counts[2 * n], counts[2 * n + 1]) for n in range(8)}
    after.settle(Snapshot(at, (Reading(KEY, 1, counters),)), at)
    after.save(at)
    found: Counter[str] = Counter(_sums(after))
    made = [decode(line) for line in file.read_text().splitlines()]
    assert len({one.id for one in made}) == len(made) > 12
    for one in made:
        found["bytes"] += sum(count.bytes for count in one.counts.values())
        found["packets"] += sum(count.packets for count in one.counts.values())
    waiting = after.ledger.pending().get((Direction.RECEIVE, "internet"), Count(0, 0))
    assert found["bytes"] + waiting.bytes == sum(counts[::2])
    assert found["packets"] + waiting.packets == sum(counts[1::2])


def _sums(of: Books) -> dict[str, int]:
    tallies = [counts for _, counts in of.ledger.tallies.state().values()]
    return {
        "bytes": sum(count.bytes for counts in tallies for count in counts.values()),
        "packets": sum(count.packets for counts in tallies for count in counts.values()),
    }


def test_the_documented_bounds_are_the_bounds() -> None:
    """docs/accounts.md states the size and number of files that the code keeps."""
    page = (Path(__file__).parents[2] / "docs" / "accounts.md").read_text()
    assert f"{accounts_file.MAX_BYTES >> 20} MiB" in page
    assert f"`.{accounts_file.FILES - 1}`" in page
    assert f"{MOST_UNWRITTEN:,} records" in page


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(LEASE, ip=pack("10.244.1.11")),
        dataclasses.replace(LEASE, sandbox="next"),
        dataclasses.replace(LEASE, opened=11.0),
        dataclasses.replace(LEASE, pod=dataclasses.replace(POD, uid="uid-b")),
        dataclasses.replace(LEASE, pod=dataclasses.replace(POD, uid="", name="b")),
    ],
)
def test_each_lease_has_a_tally_of_its_own(other: Lease) -> None:
    """Leases that differ in address, pod, sandbox or opening are never added up, also where a source knows no uid."""
    nameless = dataclasses.replace(LEASE, pod=dataclasses.replace(POD, uid="")) if not other.pod.uid else LEASE
    tallies, flow = Tallies(), (Direction.RECEIVE, "internet")
    for lease, octets in ((nameless, 3), (other, 5), (nameless, 4)):
        tallies.add(lease, flow, (octets, 1))
    assert tallies.take(nameless).counts == {flow: Count(7, 2)}
    assert tallies.take(other).counts == {flow: Count(5, 1)}
    assert len(tallies) == 0
