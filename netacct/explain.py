"""Why an address has its class, as facts for people: what `netacct rules explain ADDRESS` prints."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from netacct.errors import UsageError
from netacct.model import Address, Network
from netacct.policy import MarkTable, Policy, Prefix, Reason, Verdict, classify
from netacct.policy_found import Unused


def explain(
    policy: Policy,
    text: str,
    own: Collection[Address] = frozenset(),
    local: Iterable[Network] = (),
    unused: Iterable[Unused] = (),
    names: Mapping[Network, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Facts about one address, in the order in which to print them. Raises UsageError where `text` is no address.

    `policy` has the cluster's ranges that were found; `unused` are those that it does not use; `names` says who named a
    local range.

    Keys: `address`, `traffic`, `because` (of a cluster's range: where it was found), `prefix`, `named_by` (of a local
    range), `line` (the line of the policy that decided), `beaten` (the prefixes that cover the address too and lost),
    `unused` (ranges that were found, cover the address and are not used, with the reason), `zone`, `region`, `mark`,
    `policy`, `note`. A fact that is not there is left out.

    An IPv4-mapped IPv6 address (RFC 4291 2.5.5.2) is how a dual-stack socket shows an IPv4 peer. On the wire there is
    only the IPv4 packet (and Linux drops IPv6 packets from such a source), so the answer is the IPv4 address's.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise UsageError(f"{text!r} is not an IPv4 or IPv6 address") from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        note = f"{text} is how a dual-stack socket shows an IPv4 peer; its packets are from {mapped}"
        return _facts(policy, mapped.packed, classify(policy, mapped.packed, own, local), unused, names) | {
            "note": note
        }
    facts = _facts(policy, address.packed, classify(policy, address.packed, own, local), unused, names)
    zone = text.partition("%")[2]
    return facts | {"note": f"the zone {zone} plays no part: packets do not carry it"} if zone else facts


def _facts(
    policy: Policy, address: Address, verdict: Verdict, unused: Iterable[Unused], names: Mapping[Network, str]
) -> dict[str, str]:
    kind = next((item for item in policy.classes if item.name == verdict.traffic), None)
    found = verdict.reason is Reason.FOUND
    parsed = ipaddress.ip_address(address)
    facts = {
        "address": str(parsed),
        "traffic": verdict.traffic,
        "because": verdict.origin if found else str(verdict.reason),
        "prefix": "" if verdict.prefix is None else str(verdict.prefix),
        "named_by": names.get(verdict.prefix, "") if verdict.prefix and verdict.reason is Reason.LOCAL else "",
        "line": "" if found else verdict.origin,
        "beaten": ", ".join(_lost(prefix) for prefix in verdict.beaten),
        "unused": ", ".join(f"{_lost(fact)}: {why}" for fact, why in unused if parsed in fact.network),
        "zone": kind.zone if kind else "",
        "region": kind.region if kind else "",
        "mark": _mark(policy.marks, verdict.traffic),
        "policy": f"{policy.name} ({policy.path}, {policy.hash})",
    }
    return {name: value for name, value in facts.items() if value}


def _lost(prefix: Prefix) -> str:
    return f"{prefix.network} {prefix.traffic} ({prefix.origin or 'local range'})"


def _mark(marks: MarkTable | None, traffic: str) -> str:
    if marks is None or traffic not in marks.values:
        return ""
    return f"{marks.values[traffic]:#x}/{marks.mask:#x}"
