"""Why hostNetwork pods are told apart by nftables only: what a rule of legacy xtables by cgroup does to others.

The kernel checks all rules of a table anew at each commit, whoever makes it, and looks each cgroup up by its path then,
from the root of the committing process's cgroup namespace (find_check_match in net/ipv4/netfilter/ip_tables.c,
cgroup_mt_check_v2 in net/netfilter/xt_cgroup.c). nf_tables keeps the numbers of cgroups, and checks what is new.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import support
from cgrouplab import Cgroups, Worker, cgroups
from support import HEADERS, NODE, PEER, Node

from netacct.identity.host_pods import tree_root
from netacct.model import Family

UID = "3f0c0000-cccc"
TOOLS: dict[Family, str] = {4: "iptables-legacy", 6: "ip6tables-legacy"}
INETS = {4: "socket.AF_INET", 6: "socket.AF_INET6"}
REFUSED = "Invalid argument"

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for cgroups and network namespaces"),
    pytest.mark.skipif(shutil.which(TOOLS[4]) is None, reason="needs iptables-legacy"),
    pytest.mark.skipif(not tree_root(), reason="needs a cgroup v2 tree"),
]
both_families = pytest.mark.parametrize("family", [4, 6])


def commit(family: Family, rule: str, table: str = "mangle") -> str:
    """Add a rule to a legacy table, as any program may; returns the tool's complaint, "" where the kernel took it."""
    command = f"{TOOLS[family]} -w -t {table} -A {rule}"
    return subprocess.run(command.split(), capture_output=True, text=True, check=False).stderr


def commit_in_container(worker: Worker, family: Family, rule: str) -> str:
    """As `commit`, by a program whose cgroup namespace begins at the worker's cgroup, as that of a container does."""
    command = f"unshare -C {TOOLS[family]} -w -t mangle -A {rule}"
    worker.do(f"import subprocess; done = subprocess.run({command.split()!r}, capture_output=True, text=True)")
    return str(worker.do("result = done.stderr"))


def matched(family: Family, chain: str) -> int:
    """The bytes that the last rule of a chain of the mangle table matched."""
    return int(support.sh(f"{TOOLS[family]} -w -t mangle -nvxL {chain}").splitlines()[-1].split()[1])


@pytest.fixture
def groups(node: Node) -> Iterator[Cgroups]:
    """A pod with a cgroup, on a node."""
    del node  # its namespace is where the rules are
    with cgroups() as made:
        made.pod(UID)
        yield made


@both_families
def test_a_gone_cgroup_locks_everybody_out_of_the_table(groups: Cgroups, family: Family) -> None:
    """Once the cgroup of one rule is gone, nobody can add any rule to that table."""
    assert not commit(family, f"OUTPUT -m cgroup --path {groups.path(UID)}")
    assert not commit(family, "INPUT -m mark --mark 1")
    groups.end(UID)
    assert REFUSED in commit(family, "INPUT -m mark --mark 2")
    assert not commit(family, "INPUT -m mark --mark 2", table="filter")


@both_families
def test_a_container_is_locked_out_while_the_cgroup_lives(groups: Cgroups, family: Family) -> None:
    """A program with a cgroup namespace of its own does not find the path, and can add nothing to the table."""
    worker = groups.worker()
    assert not commit_in_container(worker, family, "INPUT -m mark --mark 1")
    assert not commit(family, f"OUTPUT -m cgroup --path {groups.path(UID)}")
    assert REFUSED in commit_in_container(worker, family, "INPUT -m mark --mark 2")
    assert not commit(family, "INPUT -m mark --mark 2")


@both_families
def test_others_commits_turn_a_rule_to_the_cgroup_of_now(groups: Cgroups, family: Family, node: Node) -> None:
    """A cgroup made again is another one, which a rule counts as soon as somebody else adds a rule."""
    assert not commit(family, f"OUTPUT -m cgroup --path {groups.path(UID)}")
    groups.end(UID)
    groups.pod(UID)
    worker = groups.worker(UID)
    worker.do(f"s = socket.socket({INETS[family]}, socket.SOCK_DGRAM)")
    send = f"s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))"
    with node.peer.socket(family, PEER[family]):
        worker.do(send)
        assert matched(family, "OUTPUT") == 0
        assert not commit(family, "INPUT -m mark --mark 1")
        worker.do(send)
        assert matched(family, "OUTPUT") == 100 + HEADERS[family]


@both_families
def test_what_an_unconnected_socket_gets_has_no_owner_yet(groups: Cgroups, family: Family, node: Node) -> None:
    """In INPUT the kernel has found the socket of a datagram only where that is connected; nf_tables looks for it."""
    assert not commit(family, f"INPUT -m cgroup --path {groups.path(UID)}")
    worker = groups.worker(UID)
    worker.do(
        f"s = socket.socket({INETS[family]}, socket.SOCK_DGRAM); s.settimeout({support.PATIENCE})\n"
        f"s.bind(({NODE[family]!r}, 5000))"
    )
    with node.peer.socket(family, PEER[family]) as peer:
        peer.sendto(bytes(100), (NODE[family], 5000))
        worker.do("s.recv(200)")
        assert matched(family, "INPUT") == 0
        worker.do(f"s.connect(({PEER[family]!r}, {support.PORT}))")
        peer.sendto(bytes(100), (NODE[family], 5000))
        worker.do("s.recv(200)")
        assert matched(family, "INPUT") == 100 + HEADERS[family]
