"""The nftables datapath's own properties: who may change its tables, what it needs, how it reads while things move."""

from __future__ import annotations

import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nftlab
import pytest
import support
from support import POD, counted, epochs, plan, tx

from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel import nft_layout, nft_render
from netacct.kernel import nft_messages as nft
from netacct.kernel import plan as plans
from netacct.kernel.netlink import attribute
from netacct.kernel.nft_messages import OWNER, PERSIST, Message
from netacct.kernel.nft_writer import NftWriter, RefusedError
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import Snapshot, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft"),
]

ROOT = Path(__file__).parents[2]
GET_ELEMENTS_RESET = 33  # NFT_MSG_GETSETELEM_RESET, in linux/netfilter/nf_tables.h


@pytest.fixture
def datapath(netns: support.Netns) -> Iterator[NftablesDatapath]:
    """The datapath in a namespace of the test's own, with the plan installed."""

    def installed() -> NftablesDatapath:
        made = NftablesDatapath()
        made.install(plan())
        return made

    made = netns.run(installed)
    yield made
    made.close()


def _protected(datapath: NftablesDatapath) -> bool:
    table = datapath._reader.table(4)
    assert table is not None
    return table.flags == OWNER | PERSIST


@pytest.mark.parametrize(
    "command",
    [
        "nft delete table ip netacct",
        "nft flush chain ip netacct forward",
        "nft add rule ip netacct forward drop",
        "nft flush set ip netacct tx-pod",
        "nft delete element ip6 netacct tx-pod { fd00:10:244:1::a }",
    ],
)
def test_nobody_else_changes_our_tables(datapath: NftablesDatapath, command: str) -> None:
    """While the agent lives, other programs are refused, root or not."""
    if not _protected(datapath):
        pytest.skip("this kernel has no persistent owners of tables (Linux 6.9)")
    with pytest.raises(AssertionError, match="not permitted"):
        support.sh(command)
    assert datapath.verify() == []


def test_a_flush_of_the_whole_ruleset_passes_us_by(datapath: NftablesDatapath) -> None:
    """`nft flush ruleset`, which nftables.service does at each reload, leaves our tables with all that they counted."""
    if not _protected(datapath):
        pytest.skip("this kernel has no persistent owners of tables (Linux 6.9)")
    support.sh("nft add table ip other")
    nftlab.set_count(datapath, tx(4, "pod"), pack(POD[4]), 1000, 10)
    before = datapath.read()
    support.sh("nft flush ruleset")

    assert "other" not in support.sh("nft list tables")
    assert datapath.verify() == []
    assert datapath.read().readings == before.readings


def test_a_second_agent_is_refused_while_the_first_lives(datapath: NftablesDatapath) -> None:
    """Two agents on one node do not write over each other; the error says that another process has the table."""
    if not _protected(datapath):
        pytest.skip("this kernel has no persistent owners of tables (Linux 6.9)")
    second = NftablesDatapath()
    with pytest.raises(DatapathError, match="table ip netacct belongs to another running process"):
        second.install(plan())
    datapath.release()
    second.install(plan())
    assert second.verify() == []
    assert datapath.verify() == []
    second.close()


def test_a_table_that_anybody_may_change_is_adopted_and_mended(netns: support.Netns) -> None:
    """Where a table has no owner (an older kernel made it so), all works, and a foreign flush is seen and mended."""
    del netns
    support.sh("nft add table ip netacct", "nft add table ip6 netacct")
    datapath = NftablesDatapath()
    datapath.install(plan())
    assert datapath.verify() == []
    support.sh("nft flush ruleset")
    found, unreadable = datapath.verify(), datapath.read().unreadable
    datapath.install(plan())

    assert found == ["IPv4: table ip netacct is missing", "IPv6: table ip6 netacct is missing"]
    assert len(unreadable) == len(datapath.read().readings)
    assert datapath.verify() == []
    datapath.close()


def test_a_dormant_table_is_woken(netns: support.Netns) -> None:
    """A table that somebody made dormant, where the kernel lets him, counts nothing; that is seen and mended."""
    del netns
    support.sh("nft 'table ip netacct { flags dormant; }'")
    datapath = NftablesDatapath()
    datapath.install(plan())
    assert datapath.verify() == []
    support.sh("nft 'table ip netacct { flags dormant; }'")
    found = datapath.verify()
    datapath.install(plan())
    table = datapath._reader.table(4)

    assert found == ["IPv4: table ip netacct is dormant, so that nothing counts"]
    assert table is not None
    assert table.flags == 0
    assert datapath.verify() == []
    datapath.close()


def test_a_chain_that_drops_is_mended(netns: support.Netns) -> None:
    """Where a table is plain and somebody lets our chain drop what it does not decide, that is seen and undone."""
    del netns
    support.sh("nft add table ip netacct", "nft add table ip6 netacct")
    datapath = NftablesDatapath()
    datapath.install(plan())
    support.sh("nft 'chain ip netacct forward { policy drop; }'")
    found = datapath.verify()
    datapath.install(plan())

    assert found == ["IPv4: chain forward hangs elsewhere than ours, or has another policy"]
    assert "policy drop" not in support.sh("nft list ruleset")
    assert datapath.verify() == []
    datapath.close()


def test_an_older_kernel_gets_a_plain_table(netns: support.Netns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel refuses the flags of a persistent owner, the table is made without them."""
    del netns
    monkeypatch.setattr("netacct.kernel.nftables.PERSIST", 0x80)  # a flag that no kernel knows
    datapath = NftablesDatapath()
    datapath.install(plan())
    table = datapath._reader.table(4)

    assert table is not None
    assert table.flags == 0
    assert datapath.verify() == []
    datapath.close()


def test_a_kernel_whose_sets_do_not_count_is_named(netns: support.Netns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.7 ignore that a set shall count; nothing is hooked in then, and the error says what lacks."""
    del netns
    monkeypatch.setattr(nft, "SET_EXPRESSION", 99)  # an attribute that no kernel knows, nor tells of
    datapath = NftablesDatapath()
    with pytest.raises(MissingFeatureError, match=r"no sets with counters, which came with Linux 5\.7"):
        datapath.install(plan())
    assert "hook" not in support.sh("nft list ruleset")
    datapath.close()


def test_a_reset_takes_the_epoch_and_is_noticed(datapath: NftablesDatapath) -> None:
    """`nft reset` of a set zeroes counters without a trace in the generation; the set is unreadable until repaired."""
    before = epochs(datapath.read())
    body = attribute(nft.ELEMENTS_TABLE, nft.text(nft.TABLE)) + attribute(nft.ELEMENTS_SET, nft.text("tx-pod"))
    datapath._reader._netlink.dump(nft.SUBSYSTEM << 8 | GET_ELEMENTS_RESET, 2, body)
    broken, found = datapath.read(), datapath.verify()
    datapath.install(plan())
    after = epochs(datapath.read())

    assert broken.unreadable == (tx(4, "pod"),)
    assert found == ["IPv4: set tx-pod has lost its sentinel (was it flushed or reset?)"]
    assert after.pop(tx(4, "pod")) != before.pop(tx(4, "pod"))
    assert after == before


def test_what_a_failed_transaction_wanted_is_in_the_error(datapath: NftablesDatapath) -> None:
    """The error of a refused transaction names the step that the kernel refused, and nothing was done."""
    generation = datapath._reader.generation()
    doomed = [nft.new_chain(4, "innocent", None), nft.delete_set(4, "nowhere")]
    with pytest.raises(RefusedError, match=r"cannot delete set nowhere \(IPv4\): No such file"):
        datapath._open().commit(doomed)
    assert datapath._reader.generation() == generation
    assert datapath._reader.hook(4, "innocent") == "missing"


def test_what_the_kernel_has_not_got_is_named(datapath: NftablesDatapath) -> None:
    """A step that the kernel does not know is a missing feature, by the name of the step."""
    with pytest.raises(MissingFeatureError, match=r"cannot make table netacct \(IPv4\): Operation not supported"):
        datapath._open().commit([nft.delete_table(4), nft.new_table(4, 0x80)])
    assert datapath.verify() == []


def test_cidrs_that_nest_deeply_fit_into_the_kernels_limit_of_chains(netns: support.Netns) -> None:
    """Thirty CIDRs inside of one another are no chain of thirty: the kernel refuses rules that lead on 16 times."""
    del netns
    names = ("storage", "service")
    networks = [ipaddress.ip_network(f"198.51.100.1/{length}", strict=False) for length in range(1, 32)]
    prefixes = tuple(Prefix(network, names[network.prefixlen % 2], "test") for network in networks)
    policy = Policy(
        "deep", "deep", "0", (*map(TrafficClass, (*names, "pod", "node", "internet")),), prefixes, "internet"
    )
    datapath = NftablesDatapath()
    datapath.install(plans.build(policy, [ipaddress.ip_network(support.LOCAL[4])], [], None))
    assert datapath.verify() == []
    datapath.close()


def _scattered_policy() -> Policy:
    """A CIDR in each of 1,500 blocks of IPv4."""
    cidrs = [f"{20 + i // 250}.{i % 250}.{i % 256}.0/24" for i in range(1500)]
    added = tuple(Prefix(ipaddress.ip_network(cidr), "storage", "test") for cidr in cidrs)
    few = support.policy()
    return replace(few, prefixes=few.prefixes + added)


def _large_policy() -> Policy:
    """Hundreds of CIDRs of both families, some inside of others, of every kind of length."""
    more = [f"100.{64 + i // 256}.{i % 256}.0/24" for i in range(0, 600, 2)] + ["100.70.1.128/25", "100.96.0.0/11"]
    more += [f"2001:db8:{i:x}::/48" for i in range(0, 600, 2)] + [f"2001:db8:{i:x}:8::/80" for i in range(0, 90, 2)]
    more += [f"2{i:03x}::/20" for i in range(1, 300, 3)]
    added = tuple(Prefix(ipaddress.ip_network(cidr), "storage", "test") for cidr in more)
    few = support.policy()
    return replace(few, prefixes=few.prefixes + added)


_MARKS = MarkTable(0x1F, {"pod": 1, "node": 2, "internet": 5})
_SINGLE = [f"10.244.1.{host}" for host in range(2, 60, 2)] + [f"fd00:10:244:1::{host:x}" for host in range(2, 60, 2)]
_OWN_ADDRESSES = [f"10.96.7.{host}" for host in range(20)] + [f"fd00:10:96::7:{host}" for host in range(20)]

_PLANS = {
    "small": plan(),
    "marks": plan(marks=_MARKS),
    "scattered": plans.build(_scattered_policy(), [ipaddress.ip_network(support.LOCAL[4])], [], None),
    "dynamic": plan(local=("10.244.0.0/16", "fd00:10:244:1::/64")),
    "large": plans.build(
        _large_policy(),
        [ipaddress.ip_network(cidr) for cidr in (*_SINGLE, "10.244.8.0/26", "fd00:10:244:8::/64")],
        [pack(ip) for ip in _OWN_ADDRESSES],
        _MARKS,
    ),
}


@pytest.mark.parametrize("wanted", _PLANS.values(), ids=_PLANS)
def test_what_we_print_for_nft_is_what_we_install(netns: support.Netns, wanted: plans.Plan) -> None:
    """nft(8) makes of our text the very tables that the datapath wants: it adopts them without a difference."""
    for layout, part in zip(nft_layout.build(wanted), wanted.families, strict=True):
        text = nft_render.text(layout, part.prefilled)
        done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    datapath = NftablesDatapath()
    datapath.adopt(wanted)
    assert datapath.verify() == []
    assert datapath.read().unreadable == ()
    datapath.close()
    families = [layout.family for layout in nft_layout.build(wanted)]
    done = subprocess.run(["nft", "-f", "-"], input=nft_render.removal_text(families), text=True, check=False)
    assert (done.returncode, netns.sh("nft list tables")) == (0, "")


def test_counters_of_many_addresses_fit_into_a_small_send_buffer(netns: support.Netns) -> None:
    """4,096 addresses are installed in pieces that a socket without privileges over the host can send."""
    del netns
    datapath = NftablesDatapath()
    writer = datapath._open()
    writer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
    datapath.install(plan(local=("10.244.0.0/21", "fd00:10:244:1::/117")))
    assert datapath.verify() == []
    assert sum(len(reading.counts) for reading in datapath.read().readings if reading.key == tx(4, "pod")) == 2048
    datapath.close()


def _python(code: str, *wrapped: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapped, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
    )


def test_without_the_capability_the_error_names_it(netns: support.Netns) -> None:
    """Without CAP_NET_ADMIN the datapath refuses by name, before it has changed anything."""
    del netns
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    code = "from netacct.kernel.nftables import NftablesDatapath; NftablesDatapath()"
    done = _python(code, "setpriv", "--bounding-set=-all", "--inh-caps=-all")
    assert "PermissionRefusedError: the nftables datapath needs CAP_NET_ADMIN" in done.stderr


def test_root_of_a_user_namespace_can_count(netns: support.Netns) -> None:
    """In a user namespace, whose root has no privileges over the host, everything works."""
    del netns
    if _python("", "unshare", "-Urn").returncode:
        pytest.skip("user namespaces are not allowed here")
    code = (
        "from support import plan; from netacct.kernel.nftables import NftablesDatapath as D; d = D();"
        "d.install(plan(local=('10.244.0.0/21',))); print(d.verify(), len(d.read().readings), d.remove().readings)"
    )
    done = _python(code, "unshare", "-Urn")
    assert done.stdout == "[] 52 ()\n", done.stderr


def test_readings_during_foreign_transactions_are_whole(datapath: NftablesDatapath) -> None:
    """A program that changes its own tables a thousand times a second interrupts dumps, and spoils no reading."""
    stop = threading.Event()
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def busy() -> None:
        assert support._libc.setns(namespace, support._CLONE_NEWNET) == 0
        writer = NftWriter()
        name = attribute(nft.TABLE_NAME, nft.text("busy"))
        body = name + attribute(nft.TABLE_FLAGS, nft.u32(0))
        while not stop.is_set():
            writer.commit([Message(nft.NEW_TABLE, 0x400, 4, body, "make"), Message(nft.DEL_TABLE, 0, 4, name, "drop")])
            time.sleep(0.0005)
        writer.close()

    first = datapath.read()
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        readings = [datapath.read() for _ in range(50)]
    finally:
        stop.set()
        thread.join()
        os.close(namespace)
    assert all(reading.readings == first.readings for reading in readings)


_SPOOFERS = """
import ctypes, os, socket, struct, sys
first, count, cpu, rendezvous = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
import time
os.sched_setaffinity(0, {cpu % os.cpu_count()})
sender = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
destination = socket.inet_aton("203.0.113.10")
packets = [
    struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28, 0, 0, 64, 17, 0, (first + n).to_bytes(4, "big"), destination)
    + struct.pack(">HHHH", 9, 9, 8, 0)
    for n in range(count)
]
while time.monotonic() < rendezvous:
    pass
for packet in packets:
    sender.sendto(packet, ("203.0.113.10", 0))
"""


def _spoof(node: support.Node, first: str, count: int, senders: int) -> list[subprocess.Popen[bytes]]:
    """Processes that send one packet from each of many addresses of the pod, all beginning at the same time."""
    start, number = str(time.monotonic() + 0.4), str(int(ipaddress.IPv4Address(first)))
    enter = ["nsenter", f"--net={node.pod.path}", sys.executable, "-c", _SPOOFERS]
    return [subprocess.Popen([*enter, number, str(count), str(cpu), start]) for cpu in range(senders)]


def test_cpus_that_race_for_a_new_address_lose_no_packet(node: support.Node) -> None:
    """Two CPUs that send the first packets of 2,000 addresses at once: each address has both (legacy sets lose one)."""
    datapath = NftablesDatapath()
    datapath.install(plan(local=("10.244.0.0/16",), capacity=4096))
    for sender in _spoof(node, "10.244.16.0", 2000, 2):
        assert sender.wait(support.PATIENCE) == 0
    found = {ip: count for (key, ip), count in counted(datapath.read()).items() if key == tx(4, "internet")}
    first = int(ipaddress.IPv4Address("10.244.16.0"))

    assert found == {(first + n).to_bytes(4, "big"): (56, 2) for n in range(2000)}
    datapath.close()


def test_no_address_is_missed_while_packets_add_others(node: support.Node) -> None:
    """Reading while a set's table grows: an address once seen is in each later reading, and its counts only grow."""
    datapath = NftablesDatapath()
    datapath.install(plan(local=("10.244.0.0/16",), capacity=16384))
    senders = _spoof(node, "10.244.16.0", 12000, 1)
    readings: list[Snapshot] = []
    while senders[0].poll() is None:
        readings.append(datapath.read())
    readings.append(datapath.read())
    values = [
        next(dict(reading.counts) for reading in snapshot.readings if reading.key == tx(4, "internet"))
        for snapshot in readings
    ]
    assert senders[0].returncode == 0
    assert len(values[-1]) == 12000
    for before, after in itertools.pairwise(values):
        assert all(after[ip] >= count for ip, count in before.items())
    datapath.close()
