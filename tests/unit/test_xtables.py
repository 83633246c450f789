"""Which rules can keep packets from ours, and how differences are put into words. Without a kernel."""

from __future__ import annotations

import struct

import pytest

from netacct.kernel.xtables import (
    Entry,
    Extension,
    chain_differences,
    decode,
    has_standard_target,
    hook_differences,
    hook_in_sync,
    place,
    rivals,
)
from netacct.model import Family


def rule(verdict: str, *, goto: bool = False, ip: bytes = b"") -> Entry:
    """A rule to a chain or with a verdict."""
    return Entry(verdict, goto, ip, (), None)


def extension(name: str) -> Entry:
    """A rule whose target is an extension."""
    return Entry(name, False, b"", (), Extension(name.encode(), 0, b""))


OURS = rule("NETACCT-TX")
ALSO = rule("NETACCT-HI")
CHAINS = {
    "HARMLESS": [extension("MARK"), rule("RETURN"), rule("")],
    "DEADLY": [extension("LOG"), rule("DROP")],
    "NESTED": [rule("HARMLESS"), rule("DEADLY")],
    "FORKED": [rule("HARMLESS", goto=True)],
    "ROUND": [rule("ROUND"), extension("TOS")],
    "LOG": [rule("ACCEPT")],
}


@pytest.mark.parametrize(
    "entry",
    [
        rule(""),
        extension("MARK"),
        extension("CONNMARK"),
        extension("TCPMSS"),
        rule("HARMLESS"),
        rule("FORKED"),
        rule("ROUND"),
    ],
    ids=lambda entry: entry.verdict or "none",
)
def test_rules_that_let_packets_go_on_are_no_rivals(entry: Entry) -> None:
    """A rule after which the next one is looked at hides nothing, however deep it jumps."""
    assert rivals([entry, OURS], CHAINS.get) == []


@pytest.mark.parametrize(
    "entry",
    [
        rule("ACCEPT"),
        rule("DROP"),
        rule("RETURN"),
        rule("QUEUE"),
        rule("DEADLY"),
        rule("NESTED"),
        rule("LOG"),
        rule("HARMLESS", goto=True),
        extension("TPROXY"),
        extension("NOBODYKNOWS"),
    ],
    ids=lambda entry: entry.verdict,
)
def test_rules_that_can_end_traversal_are_rivals(entry: Entry) -> None:
    """Verdicts, chains with one inside, gotos out of a hook, and targets that we do not know can hide our rules."""
    assert rivals([rule(""), entry, OURS], CHAINS.get) == [(2, entry)]


def test_each_chain_of_others_is_read_once() -> None:
    """Thousands of rules that lead to one chain, and chains that fork and join again, cost one look at each chain."""
    levels = 40
    chains = {f"L{at}": [rule(f"L{at + 1}"), rule(f"L{at + 1}")] for at in range(levels)}
    chains[f"L{levels}"] = [extension("MARK")]
    looked: list[str] = []

    def read(name: str) -> list[Entry] | None:
        if name in chains:
            assert name not in looked
            looked.append(name)
        return chains.get(name)

    assert rivals([*[rule("L0")] * 5000, OURS], read) == []
    assert len(looked) == len(chains)
    looked.clear()
    chains[f"L{levels}"] = [rule("DROP")]
    assert [number for number, _ in rivals([rule("L7"), rule("L0"), OURS], read)] == [1, 2]


def test_rules_after_ours_are_no_rivals() -> None:
    """What comes after our last rule cannot hide it; what comes between two of ours can hide the second."""
    assert rivals([OURS, rule("ACCEPT")], CHAINS.get) == []
    assert rivals([OURS, rule("ACCEPT"), ALSO], CHAINS.get) == [(2, rule("ACCEPT"))]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([OURS, rule("ACCEPT")], ["our rule (-j NETACCT-HI) is absent"]),
        ([OURS, OURS, ALSO], ["our rule (-j NETACCT-TX) is there 2 times"]),
        ([ALSO, OURS], ["our rules are out of order"]),
        (
            [OURS, ALSO, rule("NETACCT-X", goto=True)],
            ["a rule that we did not install leads to our chain (-g NETACCT-X)"],
        ),
        ([rule("DROP"), OURS, ALSO], ["our rules are behind rule 1 (-j DROP), which can end traversal"]),
        ([], ["our rule (-j NETACCT-TX) is absent", "our rule (-j NETACCT-HI) is absent"]),
    ],
)
def test_a_hook_out_of_sync_is_described(entries: list[Entry], words: list[str]) -> None:
    """Every way in which a hook can be wrong has its sentence, and is out of sync."""
    assert hook_differences("INPUT", [OURS, ALSO], entries, CHAINS.get) == [f"hook INPUT: {each}" for each in words]
    assert not hook_in_sync([OURS, ALSO], entries, CHAINS.get)


def test_a_hook_in_sync_needs_no_words() -> None:
    """Our rules in order, with harmless rules of others around them, are in sync."""
    entries = [extension("MARK"), OURS, rule("HARMLESS"), ALSO, rule("DROP")]

    assert hook_in_sync([OURS, ALSO], entries, CHAINS.get)
    assert hook_differences("INPUT", [OURS, ALSO], entries, CHAINS.get) == []


def test_rules_that_are_held_may_be_hidden() -> None:
    """In a hook where our rules keep their place a rival is no difference, but everything else is."""
    entries = [rule("DROP"), OURS, ALSO]

    assert hook_in_sync([OURS, ALSO], entries, CHAINS.get, held=True)
    assert hook_differences("INPUT", [OURS, ALSO], entries, CHAINS.get, held=True) == []
    assert hook_differences("INPUT", [OURS, ALSO], entries[:2], CHAINS.get, held=True) == [
        "hook INPUT: our rule (-j NETACCT-HI) is absent"
    ]


@pytest.mark.parametrize(
    ("entries", "jumps", "first"),
    [
        ([rule("DROP"), OURS], set(), 0),
        ([extension("MARK"), rule("DROP"), rule("ACCEPT"), rule("DROP")], {"-j DROP"}, 2),
        ([rule("DROP"), rule("ACCEPT"), OURS, rule("DROP"), OURS], {"-j DROP"}, 2),
        ([OURS, rule("DROP"), OURS], {"-j DROP"}, 0),
        ([rule("ACCEPT")], {"-j DROP"}, 0),
        ([], {"-j DROP"}, 0),
    ],
    ids=["nobody to yield to", "absent", "duplicate behind", "duplicate around", "rival is gone", "empty"],
)
def test_held_rules_are_put_back_where_they_were(entries: list[Entry], jumps: set[str], first: int) -> None:
    """Ours go to the head of a hook, but with somebody to yield to: where they were, or else right behind that one."""
    assert place(entries, jumps) == first


def test_a_chain_is_compared_rule_by_rule() -> None:
    """Missing, changed and additional rules are told apart and numbered as iptables does."""
    assert chain_differences("C", [OURS], None) == ["chain C is missing"]
    assert chain_differences("C", [OURS, ALSO], [OURS]) == ["chain C: rule 2 (-j NETACCT-HI) is missing"]
    assert chain_differences("C", [OURS], [rule("")]) == ["chain C: rule 1 (no target) is not what we installed"]
    assert chain_differences("C", [OURS], [OURS, ALSO]) == ["chain C: rule 2 (-j NETACCT-HI) should not be there"]


@pytest.mark.parametrize(("family", "ip_size", "entry_size"), [(4, 84, 112), (6, 136, 168)])
def test_an_entry_is_taken_apart(family: Family, ip_size: int, entry_size: int) -> None:
    """Matches and target are found by their sizes, and the kernel's pointer behind a name is not part of it."""
    match = struct.pack("=H29sB", 40, b"mark\0garbage", 1) + b"parameters"[:8]
    target = struct.pack("=H29sB", 40, b"MARK\0xyz", 2) + b"01234567"
    head = bytes(ip_size) + struct.pack("=4xHH", entry_size + 40, entry_size + 80)
    blob = head + bytes(entry_size - len(head)) + match + target

    assert not has_standard_target(family, blob)
    assert decode(family, blob, "MARK", standard=False) == Entry(
        "MARK", False, bytes(ip_size), (Extension(b"mark", 1, b"paramete"),), Extension(b"MARK", 2, b"01234567")
    )
