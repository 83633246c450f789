"""The xtables lock, with real files and real holders."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import PATIENCE

from netacct.errors import DatapathError, LockTimeoutError
from netacct.kernel.lock import DEFAULT_PATH, lock_path, xtables_lock


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock file of the test's own, not there yet."""
    made = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(made))
    return made


def test_the_file_is_that_of_iptables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XTABLES_LOCKFILE decides, and iptables' default holds without it."""
    assert lock_path() == path
    monkeypatch.delenv("XTABLES_LOCKFILE")
    assert lock_path() == Path(DEFAULT_PATH) == Path("/run/xtables.lock")


def test_a_holder_is_named(path: Path) -> None:
    """Who waits in vain learns the file, the holder's process and how long was waited."""
    with (
        xtables_lock(),
        pytest.raises(LockTimeoutError, match=rf"{path} is held by process {os.getpid()} for over 0\.05 s"),
        xtables_lock(0.05),
    ):
        pass


def test_the_lock_is_free_again_afterwards(path: Path) -> None:
    """Leaving the block, also by an exception, frees the lock."""
    with pytest.raises(ZeroDivisionError), xtables_lock():
        raise ZeroDivisionError
    with xtables_lock(0):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_waiter_gets_the_lock_when_it_is_free(path: Path) -> None:
    """A second holder waits and goes on as soon as the first has finished."""
    held, release, got = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with xtables_lock():
            held.set()
            release.wait(PATIENCE)

    def second() -> None:
        with xtables_lock(PATIENCE):
            got.set()

    threads = [threading.Thread(target=body) for body in (first, second)]
    threads[0].start()
    assert held.wait(PATIENCE)
    threads[1].start()
    assert not got.wait(0.1)
    release.set()
    for thread in threads:
        thread.join()

    assert got.is_set()
    assert path.exists()


def test_a_replaced_file_is_opened_anew(path: Path) -> None:
    """Where somebody put another file in place, the new one is locked, as iptables would do."""
    with xtables_lock():
        path.unlink()
        with xtables_lock(0):
            assert path.exists()


def test_a_file_that_may_not_be_opened_is_an_error_of_permission(path: Path) -> None:
    """Who may not open the lock learns its name and what would help."""
    program = (
        "import os\nfrom netacct.kernel.lock import xtables_lock\nos.setresuid(65534, 65534, 65534)\n"
        "with xtables_lock(): pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"PermissionRefusedError: {path}: cannot open the xtables lock: Permission denied (root is" in done.stderr


def test_a_file_that_cannot_be_had_is_no_error_of_permission(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lock cannot be had for now (a directory in its place, no directory), to start anew may help."""
    path.mkdir()  # as the kubelet does for a hostPath without a type
    with pytest.raises(DatapathError, match=f"{path}: cannot open the xtables lock: Is a directory"), xtables_lock():
        pass
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path / "missing" / "lock"))
    with pytest.raises(DatapathError, match="missing/lock: cannot open the xtables lock"), xtables_lock():
        pass


def test_a_holder_out_of_sight_has_no_number(path: Path) -> None:
    """To a container with processes of its own the kernel shows other holders as 0, which is nobody to look for."""
    program = "from netacct.kernel.lock import xtables_lock\nwith xtables_lock(0): pass"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    with xtables_lock():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"LockTimeoutError: {path} is held by another process for over" in done.stderr
