"""On a kernel without IPv6 (`ipv6.disable=1`): no socket of its family, no /proc/net/if_inet6. IPv4 is counted.

A process of its own plays it: a seccomp filter answers socket(AF_INET6) as such a kernel does, libiptc's calls too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import LOCAL, Netns, sh

pytestmark = pytest.mark.kernel

DENY = """
import ctypes, errno, platform, socket, struct, sys
from pathlib import Path
def deny_ipv6():
    number = {"x86_64": 41, "aarch64": 198}[platform.machine()]  # of socket(2)
    steps = [
        (0x20, 0, 0, 0),                          # load seccomp_data.nr
        (0x15, 0, 3, number),                     # socket?
        (0x20, 0, 0, 16),                         # load the first argument
        (0x15, 0, 1, socket.AF_INET6),
        (0x06, 0, 0, 0x50000 | errno.EAFNOSUPPORT),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),                 # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
deny_ipv6()
from netacct.kernel import families
"""

WITHOUT = 'families._ADDRESSES = Path("/nowhere")\n'


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that gets no socket of IPv6."""
    command = [sys.executable, "-c", DENY + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def configuration(netns: Netns, tmp_path: Path) -> Path:
    """A configuration with local ranges of both families."""
    assert netns
    path = tmp_path / "netacct.yaml"
    settings = {
        "local_ranges": list(LOCAL.values()),
        "ranges": {"providers": []},
        "identity": {"sources": []},
        "state_dir": str(tmp_path / "state"),
        "accounts_dir": str(tmp_path / "accounts"),
    }
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("datapath", ["iptables", "nftables"])
def test_ipv4_is_counted_on_a_kernel_without_ipv6(configuration: Path, datapath: str) -> None:
    """Installing, comparing and removing work, and touch IPv4 alone (libxtables ended the process, without a word)."""
    configuration.write_text(configuration.read_text()[:-1] + f', "datapath": "{datapath}"}}')
    run = WITHOUT + "from netacct.cli import main; sys.exit(main([*sys.argv[1:]]))"
    arguments = ("--config.file", str(configuration))
    installed = python(run, "rules", "apply", *arguments)
    assert (installed.returncode, installed.stdout) == (0, "installed\n"), installed.stderr
    differing = python(run, "rules", "diff", *arguments)
    assert (differing.returncode, differing.stdout) == (0, ""), differing.stderr
    there = sh("ipset list -n", "nft list tables")
    assert ("nacc4-tx-pod" in there, "nacc6-" in there) == (datapath == "iptables", False)
    assert ("table ip netacct" in there, "table ip6 netacct" in there) == (datapath == "nftables", False)
    removed = python(run, "rules", "remove", *arguments)
    assert (removed.returncode, removed.stdout) == (0, "removed\n"), removed.stderr


def test_a_process_that_is_denied_sockets_of_ipv6_says_so(configuration: Path) -> None:
    """Where IPv6 is there and its sockets are not (a unit's RestrictAddressFamilies), iptables refuses by name."""
    configuration.write_text(configuration.read_text()[:-1] + ', "datapath": "iptables"}')
    run = "from netacct.cli import main; sys.exit(main([*sys.argv[1:]]))"
    refused = python(run, "rules", "apply", "--config.file", str(configuration))
    assert refused.returncode == 1
    assert "no socket for IPv6 to be had, which libxtables needs: Address family not supported" in refused.stderr


def test_families_are_told_by_what_the_kernel_has() -> None:
    """Without sockets and addresses of IPv6 there is IPv4 alone; with one of them there are both."""
    show = "print(families.present())"
    assert python(show).stdout == "(4, 6)\n"
    assert python(WITHOUT + show).stdout == "(4,)\n"
    usual = "from pathlib import Path; from netacct.kernel import families; families._ADDRESSES = Path('/nowhere'); "
    done = subprocess.run([sys.executable, "-c", usual + show], capture_output=True, text=True, check=True)
    assert done.stdout == "(4, 6)\n"
