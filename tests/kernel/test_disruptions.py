"""What others do to our rules and sets on a node, and how the agent gets over it. docs/disruptions.md lists these."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from inside import Inside, rules
from support import LOCAL, Node, sh, table

pytestmark = pytest.mark.kernel


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node without an agent."""
    with agent_lab(node, tmp_path) as made:
        yield made


@pytest.fixture
def inside(lab: AgentLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """An agent in this process, beside rules of others."""
    made = lab.node.netns.run(lambda: Inside(lab, monkeypatch))
    yield made
    made.close()


def both(rule: str) -> list[str]:
    """A command on both mangle tables."""
    return [f"{tool} -w 10 -t mangle {rule}" for tool in ("iptables-legacy", "ip6tables-legacy")]


WIPE = [f"printf '*mangle\\nCOMMIT\\n' | {tool}-restore" for tool in ("iptables-legacy", "ip6tables-legacy")]
FIREWALLD = [
    f"{tool} -w -t {table} {flag}"
    for tool in ("iptables-legacy", "ip6tables-legacy")
    for table in ("raw", "mangle", "nat", "filter")
    for flag in ("-F", "-X", "-Z")
]
"""What firewalld does to every table before it writes its own rules."""

TO_RULES = {
    "flush of the table": both("-F"),
    "flush of a hook": both("-F FORWARD"),
    "full restore": WIPE,
    "firewalld reload": FIREWALLD,
    "deletion of our jumps": [
        f"iptables-legacy -t mangle -D FORWARD -s {LOCAL[4]} -j NETACCT-TX",
        f"ip6tables-legacy -t mangle -D FORWARD -s {LOCAL[6]} -j NETACCT-TX",
    ],
    "reorder": both("-D INPUT ! -i lo -j NETACCT-HI") + both("-I INPUT 1 ! -i lo -j NETACCT-HI"),
    "a rule on top that ends traversal": both("-I FORWARD -j ACCEPT"),
    "a rule in our chain": both("-I NETACCT-TX -j RETURN"),
}


@pytest.mark.parametrize("disturbance", TO_RULES)
def test_rules_come_back_exactly_once(inside: Inside, disturbance: str) -> None:
    """After what others do to rules ours are there as before, once each, and no byte that they counted is missing."""
    inside.send()
    inside.scrape()
    inside.send()  # nobody has read these when it happens
    sh(*TO_RULES[disturbance])
    assert rules() != inside.before
    inside.mended()
    assert [line for line in rules() if "ACCEPT" not in line] == [
        line for line in inside.before if "ACCEPT" not in line
    ]
    inside.send()
    inside.scrape()
    assert inside.booked() == {"internet": inside.sent}
    assert inside.books.ledger.resets == 0


DUPLICATE = [
    f"iptables-legacy -t mangle -A FORWARD -s {LOCAL[4]} -j NETACCT-TX",
    f"ip6tables-legacy -t mangle -A FORWARD -s {LOCAL[6]} -j NETACCT-TX",
]


def test_a_duplicate_is_taken_away(inside: Inside) -> None:
    """A second copy of our jump counts what passes twice until it is found; then there is one, and one count."""
    sh(*DUPLICATE)
    inside.mended()
    assert rules() == inside.before
    inside.send()
    inside.scrape()
    assert inside.booked() == {"internet": inside.sent}


TO_SETS = {
    "flush of all sets": ["ipset flush"],
    "flush of one set": ["ipset flush nacc4-tx-internet", "ipset flush nacc6-tx-internet"],
    "deletion of all sets": [*both("-F"), "ipset destroy"],
    "deletion of an address": ["ipset del nacc4-tx-internet 10.244.1.10", "ipset del nacc4-tx-internet 10.244.1.11"],
}


@pytest.mark.parametrize("disturbance", TO_SETS)
def test_sets_come_back_and_totals_go_on(inside: Inside, disturbance: str) -> None:
    """After what others do to sets every total goes on from where it was read last, and none falls or doubles."""
    inside.send()
    inside.scrape()
    sh(*TO_SETS[disturbance])
    inside.mended()
    assert inside.booked() == {"internet": inside.sent}
    assert rules() == inside.before
    inside.send()
    inside.scrape()
    assert inside.booked() == {"internet": inside.sent}


def test_a_set_in_use_cannot_be_deleted(inside: Inside) -> None:
    """`ipset destroy` of everything is refused by the kernel while our rules refer to our sets: nothing happens."""
    inside.send()
    done = subprocess.run(["ipset", "destroy"], capture_output=True, text=True, check=False)
    assert "in use by a kernel component" in done.stderr
    view = inside.scrape()
    assert (view.rules_in_sync, view.rule_repairs, inside.booked()) == (True, 0, {"internet": inside.sent})


def test_zeroed_rule_counters_are_none_of_ours(inside: Inside) -> None:
    """`iptables -Z` takes nothing away: what is counted is in sets."""
    inside.send()
    sh(*both("-Z"))
    inside.send()
    view = inside.scrape()
    assert (view.rule_repairs, inside.booked()) == (0, {"internet": inside.sent})


WRITERS = 100

WRITER = """
iptables-legacy -w 120 -t mangle -I FORWARD -m mark --mark $1 -j MARK --set-xmark 0x100/0x100
[ $(($1 % 2)) = 0 ] || iptables-legacy -w 120 -t mangle -D FORWARD -m mark --mark $1 -j MARK --set-xmark 0x100/0x100
[ $(($1 % 10)) != 0 ] || iptables-legacy -w 120 -t mangle -F NETACCT-TX
"""
"""One of the writers, by its number: all add a rule, every second one deletes it again, each tenth harms ours."""


def test_a_hundred_writers_at_once(lab: AgentLab) -> None:
    """While a hundred programs write to the table and the agent reloads and is scraped, nobody loses a rule."""
    lab.start()
    lab.page()  # so that there is something to show while the worker is busy
    answers: list[tuple[int, str]] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            answers.append(lab.get("/metrics"))
            time.sleep(0.1)

    scraper = threading.Thread(target=lab.node.netns.run, args=(scrape,))
    scraper.start()
    writers = [subprocess.Popen(["sh", "-ec", WRITER, "sh", str(number)]) for number in range(WRITERS)]
    storage = True
    try:
        while any(writer.poll() is None for writer in writers):
            storage = not storage
            lab.policy(storage=storage)
            lab.reload()
        assert [writer.wait() for writer in writers] == [0] * WRITERS
        lab.policy()
        lab.reload()
        until(lambda: lab.command("rules", "diff").returncode == 0)
        until(lambda: len(answers) >= 3)
    finally:
        done.set()
        scraper.join()
        for writer in writers:
            writer.kill()

    marks = re.findall(r"-A FORWARD -m mark --mark (\S+) -j MARK --set-xmark 0x100/0x100", table(4))
    assert sorted(int(mark, 16) for mark in marks) == list(range(0, WRITERS, 2))
    assert table(4).count(f"-A FORWARD -s {LOCAL[4]} -j NETACCT-TX") == 1
    for status, page in answers:
        assert status == 200
        assert "netacct_scrape_collector_success" in page
        assert not re.search(r"^netacct_scrape_collector_success\{.*\} 0", page, re.MULTILINE)
    octets = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


def test_the_kill_switch_is_followed_from_the_file(lab: AgentLab) -> None:
    """Writing `enabled: false` into netacct.yaml takes rules and sets away without a signal; `true` brings them."""
    lab.start()
    before = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): before})
    lab.configure(enabled=False)
    until(lambda: "NETACCT" not in table(4) + table(6) and not sh("ipset list -n"))
    datagrams(lab.node)
    lab.configure(enabled=True)
    until(lambda: lab.metric("netacct_rules_in_sync") == 1)
    after = datagrams(lab.node, packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): before + after})
