"""Whether marks may be set on this node: who else sets, selects by, or is known to own bits of our mask.

Limits: nobody can see which marks an eBPF program, a socket option (SO_MARK), an IPsec state or ebtables sets. The
table of known owners stands in for the programs that do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from netacct.errors import DatapathError, PermissionRefusedError
from netacct.kernel import marks_nft, marks_route, marks_xtables
from netacct.kernel.mark_bits import ALL_BITS, Writer

Mode: TypeAlias = Literal["auto", "on", "off"]

Kind: TypeAlias = Literal["sets", "selects", "present"]

_GRAVITY: tuple[Kind, ...] = ("sets", "selects", "present")

_WORDS: dict[Kind, str] = {
    "sets": "sets bits of the mask",
    "selects": "selects by bits of the mask",
    "present": "is here and owns bits of the mask",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason not to set marks.

    owner: the program, as far as it is known, else the kind of rule: `Cilium`, `ip rule`.
    where: what was found, for people.
    bits:  those of our mask that it concerns.
    kind:  `sets`: a rule or tc action changes them; `selects`: an ip rule routes by them; `present`: a known owner.
    """

    owner: str
    where: str
    bits: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.owner} {_WORDS[self.kind]} ({self.bits:#x}): {self.where}"


@dataclass(frozen=True, slots=True)
class MarkDecision:
    """Whether to set marks; why not, in one line ("" where they are set); all that was found; whether we could look."""

    enabled: bool
    reason: str
    findings: tuple[Finding, ...] = ()
    looked: bool = True


class Owner(NamedTuple):
    """A program that owns bits of the mark, and the signs that it is here: prefixes of names, and paths."""

    name: str
    bits: int
    interfaces: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


OWNERS = (
    Owner("kube-proxy", 0xC000, chains=("KUBE-",)),
    Owner("CNI portmap", 0x2000, chains=("CNI-HOSTPORT", "CNI-DN-")),
    Owner("AWS VPC CNI", 0x80, ("eni",), ("AWS-SNAT-CHAIN", "AWS-CONNMARK"), ("run/aws-node/ipam.json",)),
    Owner("Calico", 0xFFFF0000, ("cali", "vxlan.calico"), ("cali-",), ("run/calico",)),
    Owner("Cilium", 0xFFFF1FFF, ("cilium_",), ("CILIUM_",), ("run/cilium",)),
    Owner("Tailscale", 0xFF0000, ("tailscale",), ("ts-",), ("run/tailscale/tailscaled.sock",)),
    Owner("Weave Net", 0x60000, ("weave", "vethwe"), ("WEAVE",)),
    Owner("Istio", 0xFFF, chains=("ISTIO_",)),
    # Antrea's Egress matches the low byte; its old policy-only mode wrote 0x800.
    Owner("Antrea", 0x8FF, ("antrea-",), ("ANTREA-",), ("run/antrea",)),
    Owner("OVN-Kubernetes", ALL_BITS, ("ovn-k8s-",), ("OVN-KUBE-",), ("run/ovn-kubernetes",)),
    Owner("AWS App Mesh", ALL_BITS, chains=("APPMESH_",)),
    Owner("Talos KubeSpan", 0x60, ("kubespan",)),
    Owner("NetBird", ALL_BITS, ("wt0",), ("NETBIRD-", "netbird-"), ("run/netbird.sock",)),
    Owner("mwan3", 0x3F00, chains=("mwan3_",)),
)
"""From the projects' own documents and the fwmark registry (github.com/fwmark/registry)."""


def scan(mask: int, root: Path = Path("/")) -> tuple[Finding, ...]:
    """All that speaks against setting the bits of `mask` in this network namespace, the gravest first. Writes nothing.

    Args:
        mask: the policy's mask.
        root: where the file system begins in which owners leave their sockets.

    Raises:
        DatapathError: something that must be looked at could not be read.
    """
    try:
        legacy, chains = marks_xtables.read()
        nft, nft_chains = marks_nft.read()
        setters, selectors = [*legacy, *nft, *marks_route.actions()], marks_route.rules()
        interfaces = [name for _, name in socket.if_nameindex()]
    except (OSError, PermissionRefusedError) as error:
        raise DatapathError(f"looking for other users of packet marks: {error}") from error
    found = [
        *_conflicts(mask, setters, "sets"),
        *_conflicts(mask, selectors, "selects"),
        *present(mask, interfaces, chains | nft_chains, lambda path: os.path.exists(root / path)),  # noqa: PTH110 -- raises nothing
    ]
    return tuple(dict.fromkeys(found))


def present(
    mask: int, interfaces: Iterable[str], chains: Iterable[str], exists: Callable[[str], bool]
) -> list[Finding]:
    """The known owners of bits of the mask that left one of their signs here.

    Args:
        mask: the policy's mask.
        interfaces: names of network interfaces.
        chains: names of chains of any table.
        exists: whether a path, without its leading slash, is there.
    """
    found, names, tables = [], sorted(interfaces), sorted(chains)
    for owner in OWNERS:
        if not owner.bits & mask:
            continue
        signs = [
            *(f"interface {name}" for name in names if name.startswith(owner.interfaces)),
            *(f"chain {name}" for name in tables if name.startswith(owner.chains)),
            *(f"/{path}" for path in owner.paths if exists(path)),
        ]
        if signs:
            found.append(Finding(owner.name, signs[0], owner.bits & mask, "present"))
    return found


def decide(mode: Mode, findings: Sequence[Finding]) -> MarkDecision:
    """Whether marks are set.

    `auto` sets them where nothing was found. `on` sets them also against an ip rule, which is then the operator's own,
    and a known owner that sets none of these bits now; `off` never.

    Raises:
        DatapathError: the mode is `on` and something else sets these bits.
    """
    known = tuple(sorted(findings, key=lambda finding: _GRAVITY.index(finding.kind)))
    if mode == "off":
        return MarkDecision(False, "switched off", known)
    if mode == "auto" and known:
        more = f" (and {len(known) - 1} more)" if len(known) > 1 else ""
        return MarkDecision(False, f"{known[0]}{more}", known)
    if known and known[0].kind == "sets":
        raise DatapathError(f"marks.mode is on, but {known[0]}")
    return MarkDecision(True, "", known)


def resolve(mode: Mode, mask: int | None, root: Path = Path("/")) -> MarkDecision:
    """Look at the node, where the mode wants to know, and decide.

    Args:
        mode: the configuration's `marks.mode`.
        mask: the policy's mask; None where the policy has no marks.
        root: see `scan`.

    Raises:
        DatapathError: the mode is `on`, and something else sets these bits or the node could not be looked at. With
            `auto`, not to know is a reason not to set marks.
    """
    if mode == "off":
        return decide(mode, ())
    if not mask:
        return MarkDecision(False, "the policy has no marks")
    try:
        findings = scan(mask, root)
    except DatapathError as error:
        if mode == "on":
            raise
        return MarkDecision(False, f"the node could not be looked at: {error}", looked=False)
    return decide(mode, findings)


def _conflicts(mask: int, writers: Iterable[Writer], kind: Kind) -> list[Finding]:
    return [
        Finding(_owner(writer.where), writer.where, writer.bits & mask, kind)
        for writer in writers
        if writer.bits & mask
    ]


def _owner(where: str) -> str:
    """The known owner whose chain it is, else the kind of rule."""
    _, _, rest = where.partition(" chain ")
    chain = rest.split(" ", 1)[0]
    named = (owner.name for owner in OWNERS if chain and chain.startswith(owner.chains))
    kind = where.split(" priority ", 1)[0] if where.startswith("ip ") else " ".join(where.split(" ")[:2])
    return next(named, "a rule" if chain else kind)
