"""Which datapath suits a node, and whether one can see anything there. Pure: `detect_look.py` gathers the facts.

Goal
    Count where Kubernetes filters. Two sets of tables exist in a kernel, and every packet passes both; a node uses one.
    Ours in the same one adds no hooks that are not there already, and shows where an operator looks.

Decisions, the first that applies
    1. A datapath that this kernel or machine cannot have is out.
    2. The kubelet's chain: it keeps KUBE-IPTABLES-HINT and KUBE-KUBELET-CANARY in table mangle of its own backend for
       this very purpose. Both backends have one (a node that was switched over without a reboot): nftables, as in
       kubernetes-sigs/iptables-wrappers.
    3. kube-proxy's: its canary chain, or the table that its mode nftables makes.
    4. What is installed stays: a choice that wavers costs a gap in the counting each time.
    5. More rules of others in legacy tables than in those of iptables-nft, or the other way round.
    6. Nobody has rules. Where the legacy mangle table exists its hooks cost already, and iptables is the cheaper one
       (0.948 against 0.935 of the node's throughput); else nftables is (0.932 against 0.897 for IPv4, equal for IPv6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netacct.errors import DatapathError, MissingFeatureError

IPTABLES, NFTABLES = "iptables", "nftables"

DATAPATHS = (IPTABLES, NFTABLES)

OTHER: Mapping[str, str] = {IPTABLES: NFTABLES, NFTABLES: IPTABLES}

KUBELET_HINTS = frozenset(("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"))
"""Chains that the kubelet keeps in table mangle of the backend that it uses (KEP 3178)."""

PROXY_HINTS = frozenset(("KUBE-PROXY-CANARY",))
"""The chain that kube-proxy in mode iptables keeps in table mangle."""

PROXY_TABLE = "kube-proxy"
"""The table of kube-proxy in mode nftables."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What one set of tables holds.

    kubelet, proxy: the hints of kubelet and kube-proxy, in words.
    ours:  something that netacct made is there.
    rules: how many rules others have in tables of the names that iptables knows; 0 where a hint made counting needless.
    """

    kubelet: tuple[str, ...] = ()
    proxy: tuple[str, ...] = ()
    ours: bool = False
    rules: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A node as far as the choice goes. `Facts()` is a bare kernel that has everything.

    mangle:    a legacy mangle table exists, for IPv4 or IPv6.
    unusable:  by datapath, why it cannot be had.
    obstacles: why rules of ours would see little here, or are forbidden; one sentence each.
    """

    iptables: Backend = Backend()
    nftables: Backend = Backend()
    mangle: bool = False
    unusable: Mapping[str, str] = field(default_factory=dict)
    obstacles: tuple[str, ...] = ()

    def backend(self, name: str) -> Backend:
        """The tables of a datapath."""
        return self.iptables if name == IPTABLES else self.nftables

    def hinted(self) -> bool:
        """Whether kubelet or kube-proxy tell, so that nobody needs to count rules."""
        return any(one.kubelet or one.proxy for one in (self.iptables, self.nftables))


@dataclass(frozen=True, slots=True)
class Choice:
    """A datapath, why it was chosen (a clause without a full stop), and the facts that it rests on."""

    name: str
    reason: str
    facts: Facts


def decide(configured: str, facts: Facts) -> Choice:
    """The datapath for `datapath: CONFIGURED`. Errors: MissingFeatureError where `auto` finds that none can be had."""
    if configured in DATAPATHS:
        return Choice(configured, "the configuration says so", facts)
    return choose(facts)


def choose(facts: Facts) -> Choice:
    """The datapath that suits best. Errors: MissingFeatureError where none can be had."""
    usable = [name for name in DATAPATHS if name not in facts.unusable]
    if not usable:
        why = "; ".join(f"{name}: {facts.unusable[name]}" for name in DATAPATHS)
        raise MissingFeatureError(f"no datapath can be had on this node ({why})")
    if len(usable) == 1:
        (name,) = usable
        return Choice(name, f"{OTHER[name]} cannot be had: {facts.unusable[OTHER[name]]}", facts)
    name, reason = _suits(facts)
    return Choice(name, reason, facts)


def _suits(facts: Facts) -> tuple[str, str]:
    for who, hints in (
        ("the kubelet keeps", {name: facts.backend(name).kubelet for name in DATAPATHS}),
        ("kube-proxy keeps", {name: facts.backend(name).proxy for name in DATAPATHS}),
    ):
        for name in (NFTABLES, IPTABLES):  # in this order, as the iptables wrappers look
            if hints[name]:
                return name, f"{who} {', '.join(hints[name])}"
    installed = [name for name in DATAPATHS if facts.backend(name).ours]
    if len(installed) == 1:
        return installed[0], "it is installed, and neither kubelet nor kube-proxy tell otherwise"
    legacy, nft = facts.iptables.rules, facts.nftables.rules
    if legacy > nft:
        return IPTABLES, f"others have {legacy} rules in legacy tables and {nft} in those of iptables-nft"
    if nft:
        return NFTABLES, f"others have {nft} rules in tables of iptables-nft and {legacy} in legacy ones"
    if facts.mangle:
        return IPTABLES, "nobody has rules here, and a legacy table mangle exists, whose hooks cost already"
    return NFTABLES, "nobody has rules here, and without a legacy table mangle nftables costs less"


def require_sight(configured: str, choice: Choice) -> None:
    """Refuse where rules would see little or are forbidden, unless the configuration names a datapath.

    Errors: DatapathError.
    """
    if choice.facts.obstacles and configured not in DATAPATHS:
        raise DatapathError(
            f"rules on this node would not count what its pods send: {'; '.join(choice.facts.obstacles)} "
            f"(`datapath: {choice.name}` installs them nevertheless)"
        )
