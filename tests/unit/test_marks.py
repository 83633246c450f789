"""Which bits foreign rules change, what known owners look like, and when marks are set."""

from __future__ import annotations

import struct

import pytest

from netacct import config, policy_file
from netacct.attempts import Attempts
from netacct.errors import DatapathError
from netacct.kernel import marks
from netacct.kernel.mark_bits import ALL_BITS, Expression, expression_bits, target_bits
from netacct.kernel.marks import OWNERS, Finding, MarkDecision, decide, present, resolve
from netacct.kernel.marks_route import action_writer
from netacct.kernel.netlink import attribute, attributes
from netacct.marking import Marking

MASK = 0x1F

SETS = Finding("a rule", "iptables table mangle chain foo target MARK", 0x1, "sets")
SELECTS = Finding("ip rule", "ip rule priority 100 fwmark 0x1/0x1", 0x1, "selects")
PRESENT = Finding("Cilium", "interface cilium_host", 0x1F, "present")


@pytest.mark.parametrize(
    ("name", "revision", "info", "bits"),
    [
        ("MARK", 2, struct.pack("=II", 0x4000, 0x4000), 0x4000),
        ("MARK", 2, struct.pack("=II", 0x4000, 0), 0x4000),
        ("MARK", 2, struct.pack("=II", 0, 0x1F), 0x1F),
        ("MARK", 1, struct.pack("@LB", ALL_BITS ^ 0x3, 1), 0x3),
        ("MARK", 1, struct.pack("@LB", 0x8, 2), 0x8),
        ("MARK", 1, struct.pack("@LB", 0x8, 0), ALL_BITS),
        ("MARK", 0, struct.pack("@L", 0x8), ALL_BITS),
        ("CONNMARK", 0, struct.pack("@LLB", 0, 0x80, 2), 0x80),
        ("CONNMARK", 1, struct.pack("=IIIB", 0, 0x80, 0x80, 2), 0x80),
        ("CONNMARK", 1, struct.pack("=IIIB", 0, 0x80, 0x80, 1), 0),
        ("CONNMARK", 2, struct.pack("=IIIBBB", 0, 0xFF, 0, 0, 8, 2), 0xFF00),
        ("CONNMARK", 2, struct.pack("=IIIBBB", 0, 0xFF00, 0x1, 1, 8, 2), 0xFF),
        ("TPROXY", 0, struct.pack("=IIIH", 0x1, 0x1, 0, 0), 0x1),
        ("TPROXY", 1, struct.pack("=II18x", 0xF0, 0x1), 0xF1),
        ("SET", 3, struct.pack("=12xII", 1 << 8, 0), ALL_BITS),
        ("SET", 3, struct.pack("=12xII", 1 << 9, 0), 0),
        ("SET", 2, struct.pack("=8xII", 1 << 8, 0), 0),
        ("HMARK", 0, b"", ALL_BITS),
        ("MARK", 2, b"\0", ALL_BITS),
        ("DROP", 0, b"", 0),
    ],
)
def test_xtables_targets_change_these_bits(name: str, revision: int, info: bytes, bits: int) -> None:
    """Each revision of each target that writes marks is read as the kernel has it, an unreadable one as all."""
    assert target_bits(name, revision, info) == bits


def _load_mark(register: int = 1) -> Expression:
    return Expression("meta", {1: register.to_bytes(4, "big"), 2: (3).to_bytes(4, "big")})


def _set_mark(register: int = 1) -> Expression:
    return Expression("meta", {3: register.to_bytes(4, "big"), 2: (3).to_bytes(4, "big")})


def _and_xor(mask: int, xor: int, register: int = 1, operation: int = 0) -> Expression:
    number = register.to_bytes(4, "big")
    values = {4: b"\x08\0\x01\0" + struct.pack("=I", mask), 5: b"\x08\0\x01\0" + struct.pack("=I", xor)}
    return Expression(
        "bitwise", {1: number, 2: number, 3: (4).to_bytes(4, "big"), 6: operation.to_bytes(4, "big")} | values
    )


@pytest.mark.parametrize(
    ("expressions", "bits"),
    [
        ([_load_mark(), _and_xor(0xFFFFFFF0, 0x3), _set_mark()], 0xF),
        ([_load_mark(), _and_xor(ALL_BITS, 0x80), Expression("counter", {}), _set_mark()], 0x80),
        ([_load_mark(), _and_xor(~0xF0 & ALL_BITS, 0), _and_xor(ALL_BITS, 0x1), _set_mark()], 0xF1),
        ([_load_mark(8), _and_xor(ALL_BITS, 0x2, 8), _set_mark(1)], 0x2),
        ([_load_mark(), _and_xor(ALL_BITS, 0x2), _set_mark(2)], ALL_BITS),
        ([_load_mark(), _and_xor(ALL_BITS, 0, operation=1), _set_mark()], ALL_BITS),
        ([_load_mark(), Expression("lookup", {}), _set_mark()], ALL_BITS),
        ([Expression("immediate", {}), _set_mark()], ALL_BITS),
        ([_load_mark(), _and_xor(0x1F, 0), Expression("cmp", {})], 0),
        ([_load_mark(), Expression("ct", {})], 0),
        ([Expression("target", {1: b"MARK\0", 2: (2).to_bytes(4, "big"), 3: struct.pack("=II", 1, 1)})], 1),
    ],
)
def test_nftables_rules_change_these_bits(expressions: list[Expression], bits: int) -> None:
    """The mark is followed through registers; what is not the mark itself, changed bit by bit, replaces all of it."""
    assert expression_bits(expressions) == bits


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        (attribute(5, struct.pack("=I", 3)), ALL_BITS),
        (attribute(5, struct.pack("=I", 3)) + attribute(8, struct.pack("=I", 0xF)), 0xF),
        (attribute(3, struct.pack("=I", 3)), 0),
    ],
)
def test_tc_skbedit_changes_the_bits_of_its_mask(options: bytes, bits: int) -> None:
    """An skbedit action changes its mask's bits, all without one, none where it sets something else than the mark."""
    action = attribute(1, b"skbedit\0") + attribute(2, attribute(2, struct.pack("=5I", 7, 0, 0, 0, 0)) + options)
    writer = action_writer(dict(attributes(memoryview(action))))
    assert (writer.where, writer.bits) == ("tc action skbedit index 7", bits)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_marks_are_set_where_nobody_else_uses_the_bits(mode: str) -> None:
    """Without findings `auto` and `on` both set marks, and give no reason against them."""
    assert decide("auto" if mode == "auto" else "on", ()) == MarkDecision(enabled=True, reason="")


@pytest.mark.parametrize("finding", [SETS, SELECTS, PRESENT])
def test_auto_yields_to_any_finding(finding: Finding) -> None:
    """`auto` leaves marks off where a rule sets, an ip rule selects by, or a known owner has bits, and says which."""
    decision = decide("auto", [finding])
    assert not decision.enabled
    assert finding.where in decision.reason


def test_the_gravest_finding_is_the_reason() -> None:
    """Of several findings the reason names the one that sets bits, and how many more there are."""
    decision = decide("auto", [PRESENT, SELECTS, SETS])
    assert SETS.where in decision.reason
    assert decision.reason.endswith("(and 2 more)")
    assert decision.findings == (SETS, SELECTS, PRESENT)


def test_on_is_refused_against_a_rule_that_sets_bits() -> None:
    """`on` is an error where something else sets the bits, and the error names it."""
    with pytest.raises(DatapathError, match="chain foo target MARK"):
        decide("on", [PRESENT, SETS])


def test_on_stands_against_ip_rules_and_owners() -> None:
    """With `on` an ip rule is the operator's own, and an owner that sets nothing now is no obstacle; both are told."""
    decision = decide("on", [PRESENT, SELECTS])
    assert decision == MarkDecision(enabled=True, reason="", findings=(SELECTS, PRESENT))


def test_off_is_off() -> None:
    """`off` sets no marks, whatever the node looks like, and looks at nothing."""
    assert not decide("off", ()).enabled
    assert resolve("off", MASK) == decide("off", ())


def test_a_policy_without_marks_sets_none() -> None:
    """Without a mask in the policy there is nothing to set, also when marks are on."""
    assert resolve("on", None) == MarkDecision(enabled=False, reason="the policy has no marks")


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.name)
def test_every_known_owner_is_seen_by_each_of_its_signs(owner: object) -> None:
    """One interface, chain or path is enough to know an owner, and without any it is not there."""
    known = next(item for item in OWNERS if item is owner)
    signs: list[tuple[list[str], list[str], str]] = [([f"{name}0"], [], "") for name in known.interfaces]
    signs += [([], [f"{name}X"], "") for name in known.chains]
    signs += [([], [], path) for path in known.paths]
    assert signs
    for interfaces, chains, there in signs:
        found = present(known.bits, interfaces, chains, lambda path, there=there: path == there)  # type: ignore[misc]  # bound now
        assert [finding.owner for finding in found if finding.owner == known.name] == [known.name]
    assert not present(known.bits, ["eth0", "lo"], ["FORWARD", "NETACCT-TX"], lambda _: False)


def test_an_owner_of_other_bits_is_no_conflict() -> None:
    """Calico and kube-proxy own bits outside of the shipped mask, Cilium some inside."""
    chains = ["cali-FORWARD", "KUBE-SERVICES", "CILIUM_FORWARD"]
    found = present(MASK, [], chains, lambda _: False)
    assert [(finding.owner, finding.bits) for finding in found] == [("Cilium", 0x1F)]


def test_a_node_that_cannot_be_looked_at_once_keeps_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later look that fails leaves marks as they are, in either state; one that finds somebody switches them off."""
    answers: list[tuple[Finding, ...] | None] = [(), None, (PRESENT,), None, ()]

    def scan(_mask: int, _root: object) -> tuple[Finding, ...]:
        found = answers.pop(0)
        if found is None:
            raise DatapathError("netlink: a dump was interrupted 5 times in a row")
        return found

    monkeypatch.setattr(marks, "scan", scan)
    usual, policy = config.load(), policy_file.load("default")
    marking = Marking()
    marking.decide(usual, policy)
    states = [marking.enabled]
    for _ in range(4):
        marking.decide_again(usual, policy, Attempts())
        states.append(marking.enabled)
    assert states == [True, True, False, False, True]
