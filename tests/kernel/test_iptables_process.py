"""The iptables datapath and the process that it runs in: imports, capabilities, signals, missing features."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from support import Netns, plan, sh, table

from netacct.errors import MissingFeatureError
from netacct.kernel import layout, mangle
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.mangle import MangleTable
from netacct.kernel.rulebuilder import RuleBuilder

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("netns")]


def python(code: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own."""
    command = [*prefix, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_libraries_are_loaded_late_and_without_setuptools() -> None:
    """Importing the module loads neither python-iptables nor pyroute2; making a datapath never loads setuptools."""
    done = python(
        "import sys; from netacct.kernel.iptables import IptablesDatapath\n"
        "def loaded(): print(sorted({'iptc', 'pyroute2', 'setuptools'} & set(sys.modules)))\n"
        "loaded(); IptablesDatapath(); loaded()"
    )

    assert done.stdout.splitlines() == ["[]", "['iptc']"], done.stderr


@pytest.mark.parametrize("capability", ["net_raw", "net_admin"])
def test_a_missing_capability_is_named(capability: str) -> None:
    """Without one of the two capabilities the datapath refuses at once, and says which one it lacks."""
    done = python(
        "from netacct.kernel.iptables import IptablesDatapath; IptablesDatapath()",
        "setpriv",
        f"--bounding-set=-{capability}",
    )

    assert "PermissionRefusedError: the iptables datapath needs CAP_NET_ADMIN and CAP_NET_RAW" in done.stderr
    assert f"['CAP_{capability.upper()}'] missing" in done.stderr


def test_sigterm_waits_for_the_end_of_an_edit() -> None:
    """A SIGTERM inside an edit takes effect after it, not in it."""
    done = python(
        "import os, signal; from netacct.kernel.iptables import _sigterm_held_off\n"
        "with _sigterm_held_off():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('committed', flush=True)\n"
        "print('never', flush=True)"
    )

    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "committed\n"


def test_a_table_that_the_kernel_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no such table, the error names it and the modules that would bring it."""
    monkeypatch.setattr(mangle, "_TABLE", "mingle")
    with (
        closing(IptablesDatapath()) as datapath,
        pytest.raises(
            MissingFeatureError, match=r"cannot load in table mingle \(IPv4\).*needs ip_tables, iptable_mangle"
        ),
    ):
        datapath.install(plan())


def test_a_commit_over_a_changed_table_is_refused() -> None:
    """An edit of a table that somebody changed meanwhile is not committed, and theirs stays."""
    with closing(IptablesDatapath()) as datapath:
        datapath.install(plan())
        (wanted, _) = layout.build(plan(storage=False))
        with closing(MangleTable(datapath._iptc, 4)) as stale:
            stale.apply(RuleBuilder(datapath._iptc, 4, datapath._sets.names).build(wanted), {})
            sh("iptables-legacy -t mangle -A FORWARD -p tcp")
            before = table(4)

            assert not stale.commit()
    assert table(4) == before


def test_writers_without_the_lock_delay_but_do_not_stop_us(netns: Netns) -> None:
    """While another program changes the table under our commits, installs are tried again until they succeed."""
    sh("iptables-legacy -t mangle -N BUSY")
    done = threading.Event()

    def write() -> None:
        append = "env XTABLES_LOCKFILE=/dev/null iptables-legacy -t mangle -A BUSY -p tcp"
        try:
            for _ in range(60):  # it is refused, too, where we were in between
                sh(f"for attempt in $(seq 200); do {append} && exit 0; done; exit 1")
        finally:
            done.set()

    writer = threading.Thread(target=netns.run, args=(write,))
    writer.start()
    with closing(IptablesDatapath()) as datapath:
        storage = True
        while not done.is_set():
            storage = not storage
            datapath.install(plan(storage=storage))
        writer.join()
        datapath.install(plan())

        assert datapath.verify() == []
    assert table(4).count("-A FORWARD -s") == 1


def test_nothing_is_written_to_stdout_and_nothing_leaks(capfd: pytest.CaptureFixture[str]) -> None:
    """Building and comparing rules leaves the process' stdout alone, and repeating it opens no more files."""
    with closing(IptablesDatapath()) as datapath:
        datapath.install(plan())
        before = _descriptors()
        for number in range(6):
            datapath.install(plan(storage=bool(number % 2)))
            datapath.verify()
        after = _descriptors()

    assert after == before
    assert capfd.readouterr() == ("", "")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
