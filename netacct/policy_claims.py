"""What classes take of the clouds' lists, as a policy says it, and which class gets a prefix that several take."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from netacct.errors import ConfigError
from netacct.list_files import ListFiles
from netacct.model import Network
from netacct.policy_lists import FORMATS, Selection, nearest
from netacct.yamlfile import Node


class Claim(NamedTuple):
    """A class's claim on prefixes of a list; `origin` is for people: `p.yaml:7 (/lists/ip-ranges.json: S3, eu-1)`."""

    traffic: str
    narrowness: int
    origin: str
    node: Node


def selections(node: Node) -> Iterator[Selection]:
    """What a class takes of the clouds' lists: one mapping, or a sequence of them. Raises ConfigError."""
    items = node.value if isinstance(node.value, tuple) else (node,)
    if not items:
        raise node.error("no list is named", "format and file, and services, regions or tags of it")
    return map(_selection, items)


def _selection(node: Node) -> Selection:
    keys = node.mapping(("format", "file", "services", "regions", "tags"))
    for key in ("format", "file"):
        if key not in keys:
            raise node.error(f"the key {key} is missing", "format and file, both")
    kind, path = keys["format"].string(), keys["file"].string()
    if kind not in FORMATS:
        near = nearest(kind, FORMATS)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise keys["format"].error(f"{kind!r} is not the format of a list{hint}", ", ".join(FORMATS))
    if not path or not path.isprintable():
        raise keys["file"].error(f"{path!r} is not a path", "absolute, or relative to the policy's own folder")
    if "tags" in keys and kind != "azure":
        raise keys["tags"].error(f"format {kind} has no tags", "services, regions")
    if "tags" in keys and ("services" in keys or "regions" in keys):
        raise keys["tags"].error("a tag names service and region already", "tags, or services and regions")
    services, regions, tags = (_names(keys[key]) if key in keys else {} for key in ("services", "regions", "tags"))
    path = os.path.join(os.path.dirname(node.file), path)  # noqa: PTH118, PTH120 -- a Path would lose how it is written
    return Selection(kind, path, node, services, regions, tags)


def _names(node: Node) -> Mapping[str, Node]:
    found: dict[str, Node] = {}
    for item in node.sequence():
        name = item.string()
        if name in found:
            raise item.error(f"{name!r} is given twice, first in line {found[name].line}", "each name once")
        found[name] = item
    if not found:
        raise node.error("an empty list selects nothing", "one name or more; without the key, all are taken")
    return found


def listed(
    chosen: Iterable[tuple[str, Selection]], files: ListFiles, written: Collection[Network]
) -> Iterator[tuple[Network, Claim]]:
    """Each prefix of the lists with the claim that wins.

    Args:
        chosen: what each class takes.
        files: reads the lists.
        written: CIDRs that the policy has itself, and so decides itself.

    Raises:
        ConfigError: as `ListFiles.take`, and where two classes take one prefix by equally narrow selections.
    """
    claims: dict[Network, list[Claim]] = {}
    for name, selection in chosen:
        made: dict[tuple[str, int], Claim] = {}  # thousands of prefixes share a few
        for net, what, narrowness in files.take(selection):
            claim = made.get((what, narrowness))
            if claim is None:
                source = f"{selection.path}: {what}" if what else selection.path
                claim = Claim(name, narrowness, f"{origin(selection.node)} ({source})", selection.node)
                made[what, narrowness] = claim
            best = claims.setdefault(net, [])
            if best and narrowness > best[0].narrowness:
                best.clear()
            if not best or (narrowness == best[0].narrowness and all(rival.traffic != name for rival in best)):
                best.append(claim)
    for net, rivals in claims.items():
        if net in written:
            continue
        if len(rivals) > 1:
            raise _tie(net, *rivals[:2])
        yield net, rivals[0]


def _tie(net: Network, one: Claim, other: Claim) -> ConfigError:
    return other.node.error(
        f"{net} is in lists of class {one.traffic!r}, {one.origin}, and of class {other.traffic!r}, {other.origin}",
        "one of the two selected more narrowly, by service or region, or the CIDR itself under cidrs",
    )


def origin(node: Node) -> str:
    """Where something of a policy stands, for people: `p.yaml:7`."""
    return f"{PurePath(node.file).name}:{node.line}"
