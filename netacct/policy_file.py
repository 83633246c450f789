"""Reads a policy from YAML and refuses whatever could mean something else than its author thinks.

A policy decides under which name a byte is booked, for months, on a whole fleet. So nothing here is repaired or
guessed: host bits, a CIDR in two classes, a misspelt key or a class without CIDRs end in a ConfigError that names file,
line, key, what was found and what is allowed. docs/policies.md is the reference for users.

Of one CIDR that several places name, the most deliberate one wins: what the user wrote, then the clouds' lists (the one
selected more narrowly first, because each cloud lists the prefixes of a service once more under all of its own), then
the built-in lists.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import PurePath

from netacct import yamlfile
from netacct.errors import ConfigError
from netacct.list_files import ListFiles
from netacct.model import TUNNEL, Network
from netacct.policy import FOUND, MAY_BE_EMPTY, MarkTable, Policy, Prefix, TrafficClass, Tunnel, is_path, sort_key
from netacct.policy_claims import listed, origin, selections
from netacct.policy_lists import Selection, nearest
from netacct.yamlfile import Node

BUILTIN: Mapping[str, tuple[str, ...]] = {
    "private": (
        "0.0.0.0/32",  # the source of a DHCP client that has no address yet (RFC 2131 4.1)
        "10.0.0.0/8",  # RFC 1918
        "100.64.0.0/10",  # RFC 6598, shared address space: carrier NAT, and pods on some clouds
        "169.254.0.0/16",  # RFC 3927, link-local: metadata servers, node-local DNS
        "172.16.0.0/12",  # RFC 1918
        "192.168.0.0/16",  # RFC 1918
        "224.0.0.0/4",  # RFC 5771, multicast
        "255.255.255.255/32",  # RFC 919, limited broadcast
        "::/128",  # the source of duplicate address detection (RFC 4862 5.4.2)
        "fc00::/7",  # RFC 4193, unique local
        "fe80::/10",  # RFC 4291 2.5.6, link-local
        "ff00::/8",  # RFC 4291 2.7, multicast
    ),
}
"""Lists that a class can take by name: addresses that no packet on the internet can have."""

RESERVED = (TUNNEL, "unclassified", "unattributed")
"""Names that the metrics use for something else."""

DEFAULT_CLASS = "internet"
CLASSES_LIMIT = 64
"""Each class has two counters per local address: 64 classes of 4,096 addresses fill some 50 MB in the kernel."""

PORTS_LIMIT = 15
"""UDP ports of tunnels: as many as one xt_multiport match holds (XT_MULTI_PORTS, linux/netfilter/xt_multiport.h)."""

_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
_NAME_RULE = "a lower-case letter, then up to 14 of a-z, 0-9 and -"
_PLACE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_SHIPPED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NEVER_TUNNEL = {1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6"}
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


def load(name_or_path: str, files: ListFiles | None = None, named_at: str = "") -> Policy:
    """The policy of that name or in that file.

    What has a slash in it, or ends in .yaml, .yml or .json, is a path; anything else is the name of a shipped policy.

    Args:
        name_or_path: which one.
        files: reads the lists that it names; by default straight from their files.
        named_at: where the configuration names it, as `FILE:LINE`, for messages about the policy as a whole.

    Raises:
        ConfigError: for an unknown name, for a file that cannot be read, and for everything wrong in it.
    """
    files = files or ListFiles()
    try:
        return _load(name_or_path, files)
    except ConfigError as error:
        file, _, line = named_at.rpartition(":")
        if error.key or error.line is not None or error.file in files.asked or not line.isdecimal():
            raise
        raise ConfigError(file, "policy", f"{error.file}: {error.found}", error.allowed, int(line)) from error


def _load(name_or_path: str, files: ListFiles) -> Policy:
    if is_path(name_or_path):
        return from_document(yamlfile.load(name_or_path), PurePath(name_or_path).stem, files)
    folder = importlib.resources.files("netacct") / "policies"
    file = folder / f"{name_or_path}.yaml"
    if not _SHIPPED.fullmatch(name_or_path) or not file.is_file():
        known = shipped()
        hint = _did_you_mean(name_or_path, known)
        allowed = f"{', '.join(known)}, or a path with a / in it or ending in .yaml, .yml or .json"
        raise ConfigError(name_or_path, "", f"no policy of that name is shipped{hint}", allowed)
    return from_document(yamlfile.parse(file.read_bytes(), str(file)), name_or_path)


def shipped() -> tuple[str, ...]:
    """The names of the policies that come with the program, sorted."""
    folder = importlib.resources.files("netacct") / "policies"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")))


def from_document(document: Node, name: str, files: ListFiles | None = None) -> Policy:
    """The policy that a document describes; `files` as for `load`. Raises ConfigError for everything wrong in it."""
    if document.value is None:
        raise document.error("the file is empty", "a mapping with the key classes")
    keys = document.mapping(("classes", "default", "tunnel", "marks"))
    if "classes" not in keys:
        raise document.error("the key classes is missing", "a mapping of class names to their CIDRs")
    entries = keys["classes"].mapping()
    if len(entries) > CLASSES_LIMIT:
        raise keys["classes"].error(f"{len(entries)} classes", f"at most {CLASSES_LIMIT}")
    for entry, node in entries.items():
        _check_name(entry, node)
    default = _default(keys.get("default"), tuple(entries))
    prefixes, builtin = _prefixes(entries, default, files or ListFiles())
    names = tuple(dict.fromkeys((*entries, *MAY_BE_EMPTY, default)))
    classes = tuple(_traffic_class(item, entries.get(item)) for item in names)
    tunnel = _tunnel(keys["tunnel"]) if "tunnel" in keys else Tunnel()
    marks = _marks(keys["marks"], names) if "marks" in keys else None
    return Policy(
        name=name,
        path=document.file,
        hash=_meaning(classes, prefixes, default, tunnel, marks),
        classes=classes,
        prefixes=prefixes,
        default=default,
        tunnel=tunnel,
        marks=marks,
        default_origin=origin(keys["default"]) if "default" in keys else "",
        builtin=builtin,
    )


def _check_name(name: str, node: Node) -> None:
    if name in RESERVED:
        raise node.error(f"the class name {name!r} is reserved", f"any name but {', '.join(RESERVED)}")
    if not _NAME.fullmatch(name):
        raise node.error(f"{name!r} is not a class name", _NAME_RULE)


def _default(node: Node | None, listed: tuple[str, ...]) -> str:
    """The default class. One that is listed nowhere is fine (it needs no CIDR), unless it looks like a slip."""
    if node is None:
        return DEFAULT_CLASS
    name = node.string()
    _check_name(name, node)
    known = tuple(dict.fromkeys((*listed, *MAY_BE_EMPTY, DEFAULT_CLASS)))
    if name not in known and (hint := _did_you_mean(name, known)):
        raise node.error(f"no class is called {name!r}{hint}", f"{', '.join(known)}, or a name unlike these")
    return name


def _traffic_class(name: str, node: Node | None) -> TrafficClass:
    keys = node.mapping() if node else {}
    places = {key: keys[key].string() for key in ("zone", "region") if key in keys}
    for key, place in places.items():
        if not _PLACE.fullmatch(place):
            raise keys[key].error(
                f"{place!r} is not the name of a {key}",
                "up to 63 letters, digits, -, _ and ., a letter or digit at both ends",
            )
    return TrafficClass(name, **places)


def _prefixes(
    entries: Mapping[str, Node], default: str, files: ListFiles
) -> tuple[tuple[Prefix, ...], frozenset[Network]]:
    """All prefixes, sorted, and which of them only a built-in list has."""
    written: dict[Network, tuple[str, Node]] = {}
    builtin: dict[str, tuple[str, Node]] = {}
    chosen: list[tuple[str, Selection]] = []
    for name, node in entries.items():
        keys = node.mapping(("cidrs", "builtin", "list", "zone", "region"))
        items = keys["cidrs"].sequence() if "cidrs" in keys else ()
        for item in items:
            _claim(written, _network(item), name, item)
        if "builtin" in keys:
            word = keys["builtin"].choice(tuple(BUILTIN))
            if word in builtin:
                owner, first = builtin[word]
                raise keys["builtin"].error(
                    f"the list {word!r} is in class {owner!r} already, line {first.line}", "each list once"
                )
            builtin[word] = (name, keys["builtin"])
        if "list" in keys:
            chosen += ((name, selection) for selection in selections(keys["list"]))
        elif not items and "builtin" not in keys and name not in FOUND and name != default:
            allowed = (
                f"cidrs, a list, or builtin: {', '.join(BUILTIN)}; only {', '.join(FOUND)} and the default may be empty"
            )
            raise node.error(f"class {name!r} is empty", allowed)
    found = {net: Prefix(net, name, origin(node)) for net, (name, node) in written.items()}
    for net, claim in listed(chosen, files, written):
        found[net] = Prefix(net, claim.traffic, claim.origin)
    named = frozenset(found)
    for word, (name, node) in builtin.items():
        for net in map(ipaddress.ip_network, BUILTIN[word]):
            # What the user wrote beats the list: private, unless configured otherwise.
            found.setdefault(net, Prefix(net, name, f"{origin(node)} (built-in {word})"))
    return tuple(found[net] for net in sorted(found, key=sort_key)), frozenset(found) - named


def _claim(written: dict[Network, tuple[str, Node]], net: Network, name: str, node: Node) -> None:
    if net in written:
        owner, first = written[net]
        where = "this class" if owner == name else f"class {owner!r}"
        raise node.error(f"{net} is in {where} already, line {first.line}", "each CIDR once, in one class")
    written[net] = (name, node)


def _network(node: Node) -> Network:
    try:
        net = node.network()
    except ConfigError as error:
        allowed = error.allowed or "a CIDR such as 10.244.0.0/16 or fd00:10:244::/56, or one address"
        raise node.error(error.found, allowed) from None
    if isinstance(net, ipaddress.IPv6Network) and net.subnet_of(_MAPPED):
        plain = ipaddress.ip_network((int(net.network_address) & 0xFFFFFFFF, net.prefixlen - 96))
        raise node.error(f"{net} is an IPv4 network in IPv6 clothes, which no packet has", str(plain))
    return net


def _tunnel(node: Node) -> Tunnel:
    keys = node.mapping(("udp", "protocols"))
    udp = _numbers(keys["udp"], 65535, {}) if "udp" in keys else Tunnel().udp
    if len(udp) > PORTS_LIMIT:
        raise keys["udp"].error(f"{len(udp)} ports", f"at most {PORTS_LIMIT}, which is what one rule can match")
    protocols = _numbers(keys["protocols"], 255, _NEVER_TUNNEL) if "protocols" in keys else Tunnel().protocols
    return Tunnel(udp, protocols)


def _numbers(node: Node, maximum: int, never: Mapping[int, str]) -> tuple[int, ...]:
    found: dict[int, Node] = {}
    for item in node.sequence():
        number = item.integer(1, maximum)
        if number in never:
            raise item.error(f"{number} is {never[number]}, no encapsulation", "for example 4, 41, 47, 50")
        if number in found:
            raise item.error(f"{number} is given twice, first in line {found[number].line}", "each number once")
        found[number] = item
    return tuple(found)


def _marks(node: Node, classes: tuple[str, ...]) -> MarkTable:
    keys = node.mapping(("mask", "values"))
    for key in ("mask", "values"):
        if key not in keys:
            raise node.error(f"the key {key} is missing", "mask and values, both")
    mask = keys["mask"].integer(1, 0xFFFFFFFF)
    values: dict[str, int] = {}
    for name, item in keys["values"].mapping().items():
        if name == TUNNEL:
            raise item.error("tunnel cannot have a mark: the inner packets have theirs", ", ".join(classes))
        if name not in classes:
            raise item.error(f"no class is called {name!r}{_did_you_mean(name, classes)}", ", ".join(classes))
        value = item.integer(1, 0xFFFFFFFF)
        if value & ~mask:
            raise item.error(f"{value:#x} has bits outside the mask {mask:#x}", f"a value inside {mask:#x}")
        twin = next((other for other, taken in values.items() if taken == value), None)
        if twin:
            raise item.error(f"{value:#x} is the value of {twin!r} already", "a value of its own for each class")
        values[name] = value
    return MarkTable(mask, values)


def _meaning(
    classes: tuple[TrafficClass, ...],
    prefixes: tuple[Prefix, ...],
    default: str,
    tunnel: Tunnel,
    marks: MarkTable | None,
) -> str:
    """Twelve hexadecimal digits that change exactly when the policy means something else."""
    meaning = {
        "classes": sorted((item.name, item.zone, item.region) for item in classes),
        "prefixes": [(str(prefix.network), prefix.traffic) for prefix in prefixes],
        "default": default,
        "tunnel": [sorted(tunnel.udp), sorted(tunnel.protocols)],
        "marks": None if marks is None else [marks.mask, sorted(marks.values.items())],
    }
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]


def _did_you_mean(word: str, known: tuple[str, ...]) -> str:
    near = nearest(word, known, 0.6)
    return f", did you mean {near[0]!r}?" if near else ""
