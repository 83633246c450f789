"""The life of `netacct run` on the real kernel: restarts, reloads, scrapes, handovers, disturbances, trouble."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from agentlab import SIZE, AgentLab, Stream, agent_lab, datagrams, streams, totals, until
from support import OTHER_POD, PATIENCE, POD, Node, sh

from netacct.agent import SHARED_SECONDS
from netacct.kernel.lock import lock_path

pytestmark = pytest.mark.kernel

PODS = {"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]}
BEGAN = "netacct_accounting_start_timestamp_seconds"


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node with a running agent."""
    with agent_lab(node, tmp_path) as made:
        node.netns.run(made.start)  # fixtures are made outside of it
        yield made


def test_a_restart_goes_on_where_it_was(lab: AgentLab) -> None:
    """Rules stay while no agent runs, and the next start books what was sent meanwhile to the pod that held the IP."""
    first = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): first})
    began = lab.metric(BEGAN)
    lab.stop()
    second = datagrams(lab.node, "pod", "internet", packets=7)
    lab.pods({"team-b/b-0": [*OTHER_POD.values()], "team-c/c-0": [*POD.values()]})
    lab.start()
    third = datagrams(lab.node, "pod", "internet", packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): first + second, ("c-0", "internet"): third})
    assert lab.metric(BEGAN) == began
    assert lab.metric("netacct_ambiguous_bytes_total") == 0


@pytest.mark.parametrize("fate", ["deleted", "other boot"])
def test_without_its_store_totals_begin_at_zero(lab: AgentLab, fate: str) -> None:
    """A store that is gone, or of another boot, begins new totals at 0; the kernel's counters are their zero."""
    datagrams(lab.node)
    until(lambda: lab.totals() != {})
    began = lab.metric(BEGAN)
    lab.stop()
    datagrams(lab.node)
    state = lab.folder / "state"
    if fate == "deleted":
        for file in state.iterdir():
            file.unlink()
    else:
        _of_another_boot(state / "netacct.db")
    lab.start()
    assert lab.totals() == {}
    again = datagrams(lab.node, packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): again})
    now = lab.metric(BEGAN)
    assert began is not None
    assert now is not None
    assert began < now <= time.time()


def _of_another_boot(database: Path) -> None:
    """Write another boot id into a store, and the checksum that belongs to it."""
    import sqlite3  # noqa: PLC0415 -- nobody else here looks into the store

    from netacct.accounting.store import _checksum  # noqa: PLC0415 -- as above

    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = dict(connection.execute("SELECT name, value FROM state").fetchall()) | {"boot": "another"}
        del rows["checksum"]
        connection.execute("UPDATE state SET value = 'another' WHERE name = 'boot'")
        connection.execute("UPDATE state SET value = ? WHERE name = 'checksum'", (_checksum(rows.items()),))
        connection.commit()


def test_a_reload_keeps_every_counter(lab: AgentLab) -> None:
    """A class that goes, and comes back, takes no byte with it: its last are booked, and it begins again from there."""
    with streams(lab.node, ("pod", "storage"), ("pod", "internet")) as running:
        for storage in (False, True, False):
            flow(running)
            lab.policy(storage=storage)
            lab.reload()
            flow(running)
    octets = sum(one.sent for one in running)
    until(lambda: sum(lab.totals().values()) == octets)
    assert lab.totals()["a-0", "storage"] > 0
    assert lab.metric("netacct_config_last_reload_successful") == 1
    assert lab.metric("netacct_unexplained_resets_total") == 0


@pytest.mark.parametrize(("name", "text"), [("netacct.yaml", "policy: [1]"), ("policy.yaml", "classes: 3")])
def test_a_bad_file_changes_nothing(lab: AgentLab, name: str, text: str) -> None:
    """A reload with an error in configuration or policy is refused whole, said so in a metric, and can be mended."""
    good = (lab.folder / name).read_text(encoding="utf-8")
    octets = datagrams(lab.node)
    lab.write(name, text)
    lab.reload()
    assert lab.metric("netacct_config_last_reload_successful") == 0
    octets += datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    lab.write(name, good)
    lab.reload()
    assert lab.metric("netacct_config_last_reload_successful") == 1


def test_a_bad_pods_file_leaves_the_last_good_list(lab: AgentLab) -> None:
    """While the pods file has an error, its source is down and the pods of before own their addresses."""
    lab.write("pods.yaml", "pods: [{namespace: x}]")
    until(lambda: lab.metric("netacct_identity_source_up", source="file") == 0)
    octets = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    lab.pods(PODS)
    until(lambda: lab.metric("netacct_identity_source_up", source="file") == 1)


def test_the_kill_switch_removes_rules_and_keeps_totals(lab: AgentLab) -> None:
    """`enabled: false` takes rules and sets away and leaves health; `true` goes on with the totals."""
    before = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): before})
    lab.configure(enabled=False)
    lab.reload()
    assert sh("ipset list -n") == ""
    assert "NETACCT" not in sh("iptables-legacy-save -t mangle", "ip6tables-legacy-save -t mangle")
    assert lab.get("/readyz")[0] == lab.get("/livez")[0] == 200
    assert lab.metric("netacct_rules_in_sync") is None
    refused = lab.command("rules", "apply")
    assert (refused.returncode, refused.stderr.count("enabled is false")) == (1, 1)
    datagrams(lab.node)
    lab.configure(enabled=True)
    lab.reload()
    after = datagrams(lab.node, packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): before + after})
    assert lab.metric("netacct_rules_in_sync") == 1


def flow(running: Sequence[Stream]) -> None:
    """Wait until each stream has sent a few dozen datagrams more."""
    before = [one.sent for one in running]
    until(lambda: all(one.sent > octets + 40 * SIZE for one, octets in zip(running, before, strict=True)))


def test_two_scrapers_share_a_reading(lab: AgentLab) -> None:
    """Two scrapers without a pause never get an error, and see totals that only grow, of a reading a second."""
    lab.page()  # so that there is something to show while the worker is busy
    pages: list[list[str]] = [[], []]

    def scrape(found: list[str]) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end or len(found) < 5:
            status, body = lab.get("/metrics")
            assert status == 200
            found.append(body)

    begin = time.monotonic()
    with streams(lab.node, ("pod", "internet")):
        scrapers = [threading.Thread(target=scrape, args=(found,)) for found in pages]
        for scraper in scrapers:
            scraper.start()
        for scraper in scrapers:
            scraper.join()
    most = (time.monotonic() - begin) / SHARED_SECONDS + 2  # however long it took
    for found in pages:
        assert all('netacct_scrape_collector_success{collector="accounting"} 1' in page for page in found)
        seen = [sum(totals(page, "pod", "transmit").values()) for page in found]
        assert seen == sorted(seen)
        assert len(set(seen)) <= most


def test_a_held_xtables_lock_delays_no_scrape(lab: AgentLab) -> None:
    """While somebody holds the xtables lock and the agent waits for it, scrapes get the last reading and its age."""
    lab.page()
    with lock_path().open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lab.pods({**PODS, "team-c/c-0": ["192.0.2.77"]})  # needs new rules
        until(lambda: _age_of_the_reading(lab) > 1)  # which no scrape sees that has waited for the lock
        assert lab.get("/livez")[0] == 200
    until(lambda: lab.metric("netacct_rules_in_sync") == 1)
    assert "192.0.2.77" in sh("iptables-legacy-save -t mangle", "ipset save")


def _age_of_the_reading(lab: AgentLab) -> float:
    """What a scrape says that waits for a second or so."""
    status, body = lab.get("/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "1.5"})
    assert status == 200
    age = re.search(r"^netacct_reading_age_seconds (\S+)$", body, re.MULTILINE)
    assert age
    return float(age[1])


def test_bytes_before_the_name_find_their_pod(lab: AgentLab) -> None:
    """What an address sent before its pod is named goes to that pod in time; else it is unattributed."""
    lab.configure(identity={**_identity(lab), "late_binding": "10m"})
    lab.reload()
    _own(lab, {})
    early = datagrams(lab.node)
    time.sleep(1.2)
    lab.page()  # reads, and finds nobody
    _own(lab, {"team-c/c-0": [*POD.values()]})
    until(lambda: lab.totals() == {("c-0", "internet"): early})
    lab.configure(identity={**_identity(lab), "late_binding": "1s"})
    lab.reload()
    _own(lab, {})
    lost = datagrams(lab.node, packets=4)
    until(lambda: lab.totals("unattributed") == {("", "internet"): lost})
    _own(lab, {"team-d/d-0": [*POD.values()]})
    late = datagrams(lab.node, packets=2)
    until(lambda: lab.totals() == {("c-0", "internet"): early, ("d-0", "internet"): late})


def test_an_address_changes_hands_to_the_byte(lab: AgentLab) -> None:
    """Of an address that pods pass on by edits, each gets what was sent in its time; nothing is ambiguous."""
    driven = {}
    for number in range(4):
        _own(lab, {f"team-c/c-{number}": [*POD.values()]})
        driven[f"c-{number}", "internet"] = datagrams(lab.node, packets=5 + number)
    until(lambda: lab.totals() == driven)
    assert lab.metric("netacct_ambiguous_bytes_total") == 0
    assert lab.totals("unattributed") == {}


def test_a_pod_that_ended_keeps_its_series_for_a_while(lab: AgentLab) -> None:
    """The series of an ended pod stays until its retention is over; a pod of that name goes on from its total."""
    first = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): first})
    _own(lab, {})
    assert lab.totals() == {("a-0", "internet"): first}
    lab.configure(metrics={"zero_first": "0s", "retention": "1s"})
    lab.reload()
    until(lambda: lab.totals() == {})
    _own(lab, {"team-a/a-0": [*POD.values()]})
    assert lab.totals() == {("a-0", "internet"): first}
    second = datagrams(lab.node, packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): first + second})


def _identity(lab: AgentLab) -> dict[str, object]:
    return {"sources": ["file"], "file": {"path": str(lab.folder / "pods.yaml")}}


def _own(lab: AgentLab, owners: dict[str, list[str]]) -> None:
    """Put exactly these pods into the file, and wait until the agent knows."""
    lab.pods(owners)
    names = {name.partition("/")[2] for name in owners}

    def known() -> bool:
        listed = {pod["pod"] for pod in json.loads(lab.command("pods", "-o", "json").stdout)}
        return listed == names

    until(known)


@pytest.mark.parametrize(
    "disturbances",
    [("iptables-legacy -t mangle -D FORWARD 1", "ip6tables-legacy -t mangle -F"), ("ipset flush",)],
    ids=["rules", "sets"],
)
def test_what_others_break_is_mended(lab: AgentLab, disturbances: tuple[str, ...]) -> None:
    """Rules or sets that somebody else takes away come back; totals neither fall nor double."""
    before = datagrams(lab.node) + datagrams(lab.node, family=6)
    until(lambda: lab.totals() == {("a-0", "internet"): before})
    sh(*disturbances)
    until(lambda: lab.metric("netacct_rule_repairs_total") == 1)
    assert lab.totals() == {("a-0", "internet"): before}
    after = datagrams(lab.node, packets=4) + datagrams(lab.node, family=6)
    until(lambda: lab.totals() == {("a-0", "internet"): before + after})
    assert lab.command("rules", "diff").returncode == 0
    assert lab.metric("netacct_unexplained_resets_total") == 0


def test_scrapes_are_not_logged(lab: AgentLab) -> None:
    """Scrapes and readings log nothing at info."""
    lab.page()
    before = lab.log
    with streams(lab.node, ("pod", "internet")):
        for _ in range(3):
            lab.page()
            time.sleep(1.1)
    assert lab.log == before


def test_the_service_manager_is_told(node: Node, tmp_path: Path) -> None:
    """READY comes when the agent serves, WATCHDOG from its loop, RELOADING and READY around a reload, STOPPING last."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, agent_lab(node, tmp_path) as lab:
        manager.bind(path)
        manager.settimeout(PATIENCE)
        lab.start(wait=False, NOTIFY_SOCKET=path)
        told = [manager.recv(4096).decode()]
        while "READY=1" not in told[-1]:
            told.append(manager.recv(4096).decode())
        assert lab.is_ready()
        assert "STATUS=accounting 4 addresses, policy policy, rules in sync" in told[-1]
        assert manager.recv(4096).decode() == "WATCHDOG=1"
        lab.reload()
        lab.stop()
        manager.setblocking(False)
        rest = []
        with contextlib.suppress(BlockingIOError):
            while True:
                rest.append(manager.recv(4096).decode())
        heads = [text.partition("\n")[0] for text in rest]
        wanted = ["RELOADING=1", "READY=1", "STOPPING=1"]
        assert [head for head in heads if head in wanted] == wanted


IDLE = """
import sys
from netacct import agent, service
from netacct.cli import main
agent.CHECK_SECONDS = service.IDLE_SECONDS = 3600.0
sys.exit(main(sys.argv[4:]))
"""
"""In front of `python -m netacct`: an agent that does nothing by itself for far longer than a test waits."""


def test_signals_are_heeded_at_once(node: Node, tmp_path: Path) -> None:
    """No signal waits until the worker happens to wake up, whenever it comes."""
    with agent_lab(node, tmp_path) as lab:
        lab.prefix = (sys.executable, "-c", IDLE)
        lab.start()
        for _ in range(50):
            lab.reload()


def test_a_second_agent_is_refused(lab: AgentLab) -> None:
    """A second `run` ends at once with exit code 1 and says why; the first goes on."""
    second = lab.command("run")
    assert second.returncode == 1
    assert "agent.lock is held: an agent" in second.stderr
    assert lab.is_ready()


def test_a_taken_port_is_found_before_rules_change(node: Node, tmp_path: Path) -> None:
    """Where the port is somebody else's, `run` ends with exit code 1, names it, and has touched no rule."""
    with socket.create_server(("127.0.0.1", 19112)), agent_lab(node, tmp_path) as lab:
        done = lab.command("run")
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1:19112: Address already in use" in done.stderr
    assert sh("ipset list -n") == ""
    assert "mangle" not in Path("/proc/thread-self/net/ip_tables_names").read_text(encoding="ascii")
