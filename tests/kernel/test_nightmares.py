"""What went wrong on other people's nodes, done to both datapaths. docs/nightmares.md has the public reports.

Each docstring says what holds here, and in brackets what happened elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, streams, totals
from conformance import BACKENDS, DATAPATHS, DYNAMIC, Subject, at, expected, plan, since
from flows import FLOWS, HEADERS, MARKS, OWN, REQUEST, talk
from lab import ADDRESSES, PODS, Lab, namespace, topology
from support import OTHER_POD, POD, Node, eventually

from netacct import policy_file
from netacct.errors import DatapathError, LockTimeoutError
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.lock import lock_path
from netacct.kernel.plan import Plan, build
from netacct.model import Family, Scope, pack

TOOLS = ("ip", "ipset", "nft", "iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]

both_families = pytest.mark.parametrize("family", [4, 6])

TO_INTERNET = next(flow for flow in FLOWS if flow.name == "pod to internet")
POD_TO_POD = next(flow for flow in FLOWS if flow.name == "pod to local pod")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One topology for all tests of this file, with an xtables lock of its own."""
    with pytest.MonkeyPatch.context() as patched, topology("naccn") as made:
        patched.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables.lock"))
        yield made


@pytest.fixture(params=list(DATAPATHS))
def subject(request: pytest.FixtureRequest, world: Lab) -> Iterator[Subject]:
    """Each datapath, with nothing installed."""
    made = Subject(request.param, world)
    yield made
    made.clean()
    made.datapath.close()


def _tool(subject: Subject, family: Family = 4) -> str:
    return f"{'iptables' if family == 4 else 'ip6tables'}-{BACKENDS[subject.name]}"


def _other_plan() -> Plan:
    """A plan that has other rules than the lab's usual one."""
    return plan(PODS[4], "10.244.7.0/28", PODS[6])


@contextlib.contextmanager
def _meanwhile(subject: Subject, folder: Path, turn: str) -> Iterator[Callable[[], int]]:
    """A program on the node takes one turn (in shell; `$i` is its number, from 1) after the other until the block ends.

    Yields what tells how many are done. A turn that fails fails the test. The folder is an empty one.
    """
    done, stop = folder / "done", folder / "stop"
    done.touch()
    script = f"i=1; while [ ! -e {stop} ]; do {turn} || exit 1; echo >>{done}; i=$((i + 1)); done"
    command = ["ip", "netns", "exec", subject.lab.name("node"), "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def turns() -> int:
            assert process.poll() is None, process.communicate()
            return done.stat().st_size

        try:
            yield turns
            stop.touch()
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0, said
        finally:
            process.kill()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_no_reading_shows_zero_while_others_write(subject: Subject, tmp_path: Path) -> None:
    """While others commit to mangle, each reading has all bytes (a reader between two steps of a commit saw zeros)."""
    subject.install(plan())
    for family in (4, 6):
        talk(subject.lab, family, TO_INTERNET)
    wanted = expected(4, TO_INTERNET) | expected(6, TO_INTERNET)
    one = f"{_tool(subject)} -w 20 -t mangle -I FORWARD -s 192.0.2.9 -j ACCEPT"
    with _meanwhile(subject, tmp_path, f"{one} && {one.replace('-I', '-D')}") as turns:
        readings = 0
        while readings < 30 or turns() < 200:
            assert subject.read() == wanted
            readings += 1


def test_looking_writes_nothing(subject: Subject) -> None:
    """Reading and comparing leave even a damaged rule set as it is (a refresh once committed what was pending)."""
    subject.install(plan())
    subject.datapath.close()
    damage = {"iptables": "iptables-legacy -t mangle -F FORWARD", "nftables": "nft flush chain ip netacct forward"}
    subject.lab.run("node", *damage[subject.name].split())
    before = _ruleset(subject)
    subject.__post_init__()
    with subject.on_node() as datapath:
        datapath.adopt(plan())
        assert datapath.verify()
        datapath.read()
        assert datapath.verify()
    assert _ruleset(subject) == before


def _ruleset(subject: Subject) -> str:
    """All rules on the node, without counters."""
    commands = [f"{tool}-legacy-save -t mangle" for tool in ("iptables", "ip6tables")]
    if subject.name == "nftables":
        commands = ["nft -s list ruleset"]
    saved = [subject.lab.run("node", *command.split()) for command in commands]
    return "\n".join(re.sub(r"\[\d+:\d+\]", "", line) for line in "\n".join(saved).splitlines() if line[:1] != "#")


def test_looking_again_and_again_grows_nothing(subject: Subject) -> None:
    """However often new objects look and read, memory and open files are as before (readers leaked both)."""
    subject.install(plan())
    subject.datapath.close()

    def look(times: int) -> tuple[int, int]:
        for _ in range(times):
            with subject.on_node():
                datapath = DATAPATHS[subject.name]()
                datapath.adopt(plan())
                assert datapath.verify() == []
                for _ in range(5):
                    datapath.read()
                datapath.close()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(list(Path("/proc/self/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")

    files, memory = look(6)
    files_after, memory_after = look(12)
    subject.__post_init__()
    assert files_after == files
    assert memory_after - memory < 1_000_000


def test_two_namespaces_are_not_mixed_up(subject: Subject) -> None:
    """Two nodes of one process each have their own counters and damage (a cached table was read in the wrong one)."""
    subject.install(plan())
    with namespace("naccm") as lab:
        other = Subject(subject.name, lab)
        other.install(_other_plan())
        talk(subject.lab, 4, POD_TO_POD)
        assert (subject.read(), other.read()) == (expected(4, POD_TO_POD), {})
        if not isinstance(other.datapath, IptablesDatapath):
            other.datapath.release()
        damage = {"iptables": "iptables-legacy -t mangle -F", "nftables": "nft flush chain ip netacct tx"}
        lab.run("node", *damage[subject.name].split())
        assert (bool(subject.verify()), bool(other.verify())) == (False, True)
        other.install(_other_plan())
        assert (subject.verify(), other.verify()) == ([], [])
        other.datapath.close()
    assert subject.read() == expected(4, POD_TO_POD)


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_three_scrapers_and_a_reload_do_not_kill_the_agent(node: Node, tmp_path: Path, datapath: str) -> None:
    """Scraped by three and reloaded meanwhile, the agent gives each a whole page (libiptc aborted in two threads)."""
    with agent_lab(node, tmp_path) as lab, streams(node, ("pod", "internet")):
        lab.configure(datapath=datapath)
        lab.start()
        pages: list[list[str]] = [[], [], []]
        enough = threading.Event()
        scrapers = [
            threading.Thread(target=node.netns.run, args=(lambda to=to: _scrape(lab, to, enough),)) for to in pages
        ]
        for scraper in scrapers:
            scraper.start()
        try:
            for storage in (False, True):
                lab.policy(storage=storage)
                lab.reload()
        finally:
            enough.set()
        for scraper in scrapers:
            scraper.join()
        assert lab.is_ready()
    for found in pages:
        assert len(found) >= 5
        assert all('netacct_scrape_collector_success{collector="accounting"} 1' in page for page in found)
        seen = [sum(totals(page, "pod", "transmit").values()) for page in found]
        assert seen == sorted(seen)


def _scrape(lab: AgentLab, found: list[str], enough: threading.Event) -> None:
    while not enough.is_set() or len(found) < 5:
        status, body = lab.get("/metrics")
        assert status == 200
        found.append(body)


# --- beside other writers ---------------------------------------------------------------------------------------------


def test_a_rule_that_somebody_replaced_stays_replaced(subject: Subject, tmp_path: Path) -> None:
    """No install undoes what another program replaces at the same time (a commit from a snapshot reverted it)."""
    tool = f"{_tool(subject)} -w 20 -t mangle"
    subject.lab.run("node", "sh", "-c", f"{tool} -N BUSY && {tool} -A BUSY -s 192.0.2.0 -j ACCEPT")
    shown = f"{tool} -S BUSY | grep -qF -- -s\\ 192.0.2."
    replace = f"{tool} -R BUSY 1 -s 192.0.2.$((i % 200)) -j ACCEPT && {shown}$((i % 200))/32"
    with _meanwhile(subject, tmp_path, f"{shown}$(((i - 1) % 200))/32 && {replace}") as turns:
        installs = 0
        while installs < 20 or turns() < 60:
            subject.install(_other_plan() if installs % 2 else plan())
            installs += 1
    last = (tmp_path / "done").stat().st_size % 200
    assert f"-s 192.0.2.{last}/32 " in subject.lab.run("node", "sh", "-c", f"{tool} -S BUSY")


def test_a_native_rule_in_mangle_makes_us_add_nothing(subject: Subject) -> None:
    """With a native rule in `ip mangle`, comparing and mending add no rule (hidden ones were added for ever)."""
    subject.lab.run("node", "iptables-nft", "-t", "mangle", "-A", "FORWARD", "-s", "192.0.2.9", "-j", "ACCEPT")
    subject.lab.run("node", "nft", "add rule ip mangle FORWARD ip saddr 192.0.2.8 counter drop")
    try:
        subject.install(plan())
        before = _ruleset(subject), _nft_rules(subject)
        for _ in range(5):
            assert subject.verify() == []
            subject.install(plan())
        talk(subject.lab, 4, TO_INTERNET)
        assert subject.read() == expected(4, TO_INTERNET)
        assert (_ruleset(subject), _nft_rules(subject)) == before
    finally:
        subject.lab.run("node", "nft", "flush", "table", "ip", "mangle")


def _nft_rules(subject: Subject) -> int:
    return len(subject.lab.run("node", "nft", "-s", "list", "ruleset").splitlines())


def test_a_foreign_rule_that_cannot_be_read_spoils_nothing(subject: Subject, tmp_path: Path) -> None:
    """A foreign rule whose extension is missing hides none of ours (it ended the dump of whole exporters)."""
    libraries = next(path for path in Path("/usr/lib").glob("*/xtables") if path.is_dir())
    for library in libraries.iterdir():
        if "CONNMARK" not in library.name and "statistic" not in library.name:
            (tmp_path / library.name).symlink_to(library)
    tool = _tool(subject)
    rules = ("-j CONNMARK --save-mark", "-m statistic --mode nth --every 2 --packet 0 -j ACCEPT")
    for rule in rules:
        subject.lab.run("node", tool, "-t", "mangle", "-A", "PREROUTING", *rule.split())
        subject.lab.run("node", tool, "-t", "mangle", "-A", "FORWARD", *rule.split())
    code = (
        "from conformance import DATAPATHS, plan\n"
        f"datapath = DATAPATHS[{subject.name!r}]()\n"
        "datapath.install(plan())\n"
        "print(datapath.verify(), len(datapath.read().readings))\n"
    )
    environ = {"XTABLES_LIBDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = ["ip", "netns", "exec", subject.lab.name("node"), sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=60)
    talk(subject.lab, 4, TO_INTERNET)
    with subject.on_node() as datapath:
        datapath.adopt(plan())

    assert re.fullmatch(r"\[\] \d\d\n", done.stdout), done.stderr
    assert subject.verify() == []
    assert subject.read() == expected(4, TO_INTERNET)


def test_thousands_of_foreign_rules_change_nothing(subject: Subject) -> None:
    """Beside 3,000 rules of others ours are put in place and count exactly (reading all rules took seconds)."""
    lines = [f"-A MANY -s 192.0.{n // 250}.{n % 250} -m comment --comment number-{n} -j RETURN" for n in range(3000)]
    text = "\n".join(["*mangle", ":MANY - [0:0]", *lines, "COMMIT", ""])
    subject.lab.run("node", f"{_tool(subject)}-restore", "--noflush", text=text)
    subject.install(plan())
    talk(subject.lab, 4, TO_INTERNET)

    assert subject.verify() == []
    assert subject.read() == expected(4, TO_INTERNET)
    assert subject.lab.run("node", f"{_tool(subject)}-save", "-t", "mangle").count("-A MANY") == len(lines)


def test_a_held_lock_keeps_nobody_from_reading(subject: Subject) -> None:
    """Reading and comparing need no xtables lock, and nftables none at all (agents ended when it was held)."""
    subject.install(plan())
    with lock_path().open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        talk(subject.lab, 4, TO_INTERNET)
        assert subject.read() == expected(4, TO_INTERNET)
        assert subject.verify() == []
        if isinstance(subject.datapath, IptablesDatapath):
            with (
                subject.on_node(),
                contextlib.closing(IptablesDatapath(patience=0.1)) as impatient,
                pytest.raises(LockTimeoutError, match=rf"\b{os.getpid()}\b"),
            ):
                impatient.install(_other_plan(), subject.dropped.append)
        else:
            subject.install(_other_plan())
    subject.install(_other_plan())
    assert subject.total() == expected(4, TO_INTERNET)


def test_a_lock_file_out_of_reach_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /run is read-only, iptables refuses by the file's name and nftables installs (tools ended with code 4)."""
    monkeypatch.setenv("XTABLES_LOCKFILE", "/proc/xtables.lock")
    if subject.name == "iptables":
        with pytest.raises(DatapathError, match=r"/proc/xtables\.lock: cannot open"):
            subject.install(plan())
        assert subject.lab.run("node", "iptables-legacy-save", "-t", "mangle").count("NETACCT") == 0
        monkeypatch.undo()
    subject.install(plan())
    assert subject.verify() == []


def test_our_names_are_nobody_elses(subject: Subject) -> None:
    """All that we make has our prefix and fits the tools' limits, and names like it survive us (names collided)."""
    foreign = ("NETACCT", "NETACCTX-TX", "KUBE-FORWARD")
    for name in foreign:
        subject.lab.run("node", _tool(subject), "-t", "mangle", "-N", name)
    subject.install(plan())
    saved = subject.lab.run("node", f"{_tool(subject)}-save", "-t", "mangle")
    ours = {*re.findall(r"^:([\w-]+) -", saved, re.MULTILINE)} - {*foreign}
    sets = subject.lab.run("node", "ipset", "list", "-n").split()
    tables = {*re.findall(r"table \S+ (\S+)", subject.lab.run("node", "nft", "list", "tables"))} - {"mangle"}
    with subject.on_node() as datapath:
        datapath.remove()
    saved = subject.lab.run("node", f"{_tool(subject)}-save", "-t", "mangle")

    assert all(re.fullmatch(r"NETACCT-.{1,20}", name) for name in ours)
    assert all(re.fullmatch(r"nacc[46]-.{1,25}", name) for name in sets)
    assert tables - {"nat", "filter"} == ({"netacct"} if subject.name == "nftables" else set())
    assert {*re.findall(r"^:([\w-]+) -", saved, re.MULTILINE)} == {*foreign}


# --- what packets meet ------------------------------------------------------------------------------------------------


@both_families
def test_no_verdict_before_ours_in_another_chain_hides_a_packet(subject: Subject, family: Family) -> None:
    """Accepts in foreign base chains around ours, at the same priority too, end nothing (accept is not final)."""
    subject.install(plan())
    hooks = ("prerouting", "input", "forward", "output", "postrouting")
    chains = [
        f"chain {hook}{-priority} {{ type filter hook {hook} priority {priority}; accept; }};"
        for hook in hooks
        for priority in (-300, -151, -150, -1)
    ]
    subject.lab.run("node", "nft", "-f", "-", text=f"table inet before {{ {' '.join(chains)} }}")
    try:
        talk(subject.lab, family, TO_INTERNET)
        talk(subject.lab, family, POD_TO_POD)
    finally:
        subject.lab.run("node", "nft", "delete", "table", "inet", "before")
    assert subject.read() == expected(family, TO_INTERNET) | expected(family, POD_TO_POD)


@both_families
def test_marks_of_others_change_no_class(subject: Subject, family: Family) -> None:
    """Whole marks restored from connections change no count: no class is read from a mark (restoring overwrote it)."""
    tool = (_tool(subject, family), "-t", "mangle")
    restore = ("CONNMARK", "--restore-mark", "--nfmask", "0xffffffff", "--ctmask", "0xffffffff")
    save = ("CONNMARK", "--save-mark", "--nfmask", "0xffffffff", "--ctmask", "0xffffffff")
    subject.install(plan(marks=MARKS))
    for hook in ("PREROUTING", "FORWARD", "OUTPUT"):
        subject.lab.run("node", *tool, "-A", hook, "-j", *restore)
    subject.lab.run("node", *tool, "-A", "POSTROUTING", "-j", *save)
    for flow in (TO_INTERNET, POD_TO_POD, TO_INTERNET):
        before = subject.read()
        talk(subject.lab, family, flow)
        assert since(before, subject.read()) == expected(family, flow)


KINDS: dict[Family, dict[str, str]] = {
    4: {
        "10.244.9.9": "pod", "10.96.0.77": "service", "192.168.50.77": "node", "169.254.169.254": "private",
        "100.64.3.4": "private", "10.200.0.9": "private", "172.20.0.99": "private", "192.168.51.1": "private",
        "8.8.8.8": "internet", "198.18.0.1": "internet", "172.32.0.1": "internet", "100.128.0.1": "internet",
        "11.0.0.1": "internet", "224.0.0.251": "private",
    },
    6: {
        "fd00:10:244:9::9": "pod", "fd00:10:96::77": "service", "fd00:50::77": "node", "fd00:9::5": "private",
        "fc00::1": "private", "2001:4860:4860::8888": "internet", "fe00::1": "internet", "64:ff9b::808:808": "internet",
    },
}  # fmt: skip
"""Destinations of all kinds, and their classes by the policy below."""

REAL_POLICY = """\
classes:
  pod: {cidrs: [10.244.0.0/16, "fd00:10:244::/48"]}
  node: {cidrs: [192.168.50.0/24, "fd00:50::/64"]}
  service: {cidrs: [10.96.0.0/12, "fd00:10:96::/112"]}
  private: {builtin: private}
default: internet
"""


@both_families
def test_every_kind_of_address_is_in_one_class(subject: Subject, family: Family, tmp_path: Path) -> None:
    """CGNAT, metadata, VPC and the like are in one class each, by longest prefix (all RFC 1918 was "in the zone")."""
    path = tmp_path / "policy.yaml"
    path.write_text(REAL_POLICY)
    local = [ipaddress.ip_network(cidr) for cidr in PODS.values()]
    subject.install(build(policy_file.load(str(path)), local, OWN, None))
    size = REQUEST + HEADERS[family]
    packets: Counter[str] = Counter()
    with (
        _into_the_void(subject.lab, family),
        subject.lab.socket("poda", family, ADDRESSES[family]["poda"]) as pod,
        subject.lab.socket("node", family, ADDRESSES[family]["node"]) as host,
    ):
        host.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
        for address, traffic in KINDS[family].items():
            forwarded = not ipaddress.ip_address(address).is_multicast
            (pod if forwarded else host).sendto(b"q" * REQUEST, (address, 9))
            packets[f"tx-{traffic} poda" if forwarded else f"ho-{traffic}"] += 1

    assert subject.read() == at(family, {words: (size * count, count) for words, count in packets.items()})


@contextlib.contextmanager
def _into_the_void(lab: Lab, family: Family) -> Iterator[None]:
    """Let every packet that leaves the node find its end in silence."""
    far = ("ip", f"-{family}", "route")
    nodes = {4: "192.168.50.77", 6: "fd00:50::77"}[family]
    lab.run("node", *far, "add", nodes, "via", ADDRESSES[family]["othernode"])
    lab.run("far", *far, "add", "blackhole", nodes)
    lab.run("far", *far, "add", "blackhole", "default")
    try:
        yield
    finally:
        lab.run("far", *far, "del", "blackhole", "default")
        lab.run("far", *far, "del", "blackhole", nodes)
        lab.run("node", *far, "del", nodes, "via", ADDRESSES[family]["othernode"])


# --- pods that come and go --------------------------------------------------------------------------------------------


def test_addresses_can_be_added_for_ever(subject: Subject) -> None:
    """After 120,000 additions and as many deletions the next one works, in both families (a library gave up)."""
    subject.install(plan(*DYNAMIC, capacity=600))
    ips = [pack(f"10.244.8.{n}") for n in range(200)] + [pack(f"fd00:10:244:1::5:{n:x}") for n in range(200)]
    with subject.on_node() as datapath:
        for _ in range(30):
            datapath.add(ips)
            datapath.discard(ips)
        datapath.add(ips)
        readings = [reading for reading in datapath.read().readings if reading.key.scope is Scope.POD]
    assert len(readings) == 20
    for reading in readings:
        wanted = {ip for ip in ips if (len(ip) == 4) == (reading.key.family == 4)}
        assert wanted <= reading.counts.keys()


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_a_pod_that_nobody_scraped_keeps_its_bytes(node: Node, tmp_path: Path, datapath: str) -> None:
    """A pod that came, sent and went between two scrapes has all its bytes, its heir its own (the last were lost)."""
    with agent_lab(node, tmp_path) as lab:
        lab.configure(datapath=datapath)
        lab.pods({"team-b/b-0": [*OTHER_POD.values()]})
        lab.start()
        sent = {}
        for name in ("job-1", "job-2"):
            lab.pods({f"team-a/{name}": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]})
            eventually(lambda: name in lab.command("pods").stdout)  # noqa: B023  # called before the next turn
            octets = sum(datagrams(node, family=family, packets=7) for family in (4, 6))
            sent[name, "internet"] = octets
        lab.pods({"team-b/b-0": [*OTHER_POD.values()]})
        eventually(lambda: lab.totals() == sent)
        assert lab.totals("unattributed") == {}
