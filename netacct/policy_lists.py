"""The lists of addresses that clouds publish about themselves: how they are written, and what a policy takes of them.

Formats, each a JSON document, as the providers describe them:

- `aws`: ip-ranges.json, https://docs.aws.amazon.com/vpc/latest/userguide/aws-ip-syntax.html
- `google`: cloud.json (a service and a scope for each prefix) and goog.json (neither),
  https://support.google.com/a/answer/10026322
- `azure`: ServiceTags_*.json, https://learn.microsoft.com/azure/virtual-network/service-tags-overview; what the Service
  Tag Discovery API answers has the same form.

A list is taken whole or not at all: whoever wrote it is far away, and half of it would book bytes under a wrong name
without anybody noticing. So a document that is not what its format says is a ConfigError, also in a part that nobody
selects; only what is inside the prefixes' text is looked at when they are selected, because Azure publishes a hundred
thousand of them. Everything here is pure.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from netacct.errors import ConfigError
from netacct.model import Network
from netacct.yamlfile import Node

_ALL_OF = {"aws": "AMAZON", "azure": "AzureCloud"}
"""The service whose prefixes are those of all the others once more; Google has a file for it."""

_SHOWN = 60
"""So many names a message lists; of more (Azure has three thousand tags) it shows the nearest."""

PREFIXES_LIMIT = 50_000
"""Prefixes that a policy can take of one list at once. No cloud has more of its own; with many more, a node with the
memory that the unit allows could not make the rules, and would be killed for it at each start."""

_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


class Entry(NamedTuple):
    """Prefixes that a list says the same of. `service`, `region` and `tag` are "" where the list has none.

    `region` is what AWS and Azure call so, and Google `scope`. `key` is where the entry stands, for messages.
    """

    prefixes: Sequence[str]
    service: str
    region: str
    tag: str
    key: str


@dataclass(frozen=True, slots=True)
class Published:
    """A list, read."""

    path: str
    format: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a policy wants of which list.

    format: a key of FORMATS.
    path: the file, absolute or relative to the working directory.
    node: where the policy says so.
    services, regions, tags: names with the places that name them; empty for "all".
    """

    format: str
    path: str
    node: Node
    services: Mapping[str, Node]
    regions: Mapping[str, Node]
    tags: Mapping[str, Node]

    def takes(self, entry: Entry) -> bool:
        """Whether the entry is asked for."""
        return (
            (not self.services or entry.service in self.services)
            and (not self.regions or entry.region in self.regions)
            and (not self.tags or entry.tag in self.tags)
        )

    def narrowness(self, entry: Entry) -> int:
        """Which of the two, a service and a region, the entry was selected by: one that is narrower goes first."""
        by_service = bool(self.services or self.tags or self.format == "google") and bool(entry.service)
        by_region = bool(self.regions or self.tags) and bool(entry.region)
        return (by_service and entry.service != _ALL_OF.get(self.format)) + by_region


class Listed(NamedTuple):
    """One selected prefix. `what` names service and region, or the tag: `S3, eu-west-1`."""

    network: Network
    what: str
    narrowness: int


def parse(data: bytes, path: str, kind: str) -> Published:
    """A list from the bytes of its file. Raises ConfigError for all that is not a list of this format."""
    try:
        document = json.loads(data)
    except UnicodeDecodeError as error:
        raise ConfigError(path, "", f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        found = "is empty" if not data.strip() else f"is not JSON, or cut short: {error.msg} (character {error.pos})"
        raise ConfigError(path, "", found, line=error.lineno) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise ConfigError(path, "", f"is not a list that a cloud publishes: {error}") from error
    try:
        entries = tuple(FORMATS[kind](document))
    except _FormatError as error:
        other = next((name for name, marks in _MARKS.items() if name != kind and marks(document)), "")
        hint = f", it looks like format {other}" if other else ""
        raise ConfigError(path, error.key, f"{error.found}{hint}", _SHAPES[kind]) from None
    if not any(entry.prefixes for entry in entries):
        raise ConfigError(path, "", "has no prefixes", _SHAPES[kind])
    return Published(path, kind, entries)


def select(published: Published, wanted: Selection) -> tuple[Listed, ...]:
    """The prefixes that a policy asks for; the narrowest of equal ones only.

    Raises ConfigError, at the policy's line, for a name that the list does not have and for names that it has only
    apart from each other; and, in the list's file, for what is no prefix.
    """
    _check_names(published, wanted.services, "service", {entry.service for entry in published.entries})
    _check_names(published, wanted.regions, "region", {entry.region for entry in published.entries})
    _check_names(published, wanted.tags, "tag", {entry.tag for entry in published.entries})
    found: dict[str, Listed] = {}
    for entry in filter(wanted.takes, published.entries):
        what = entry.tag if wanted.tags else ", ".join(filter(None, (entry.service, entry.region)))
        narrowness = wanted.narrowness(entry)
        for number, text in enumerate(entry.prefixes):
            known = found.get(text)
            if known is None:
                found[text] = Listed(_network(published.path, entry, number), what, narrowness)
            elif known.narrowness < narrowness:
                found[text] = known._replace(what=what, narrowness=narrowness)
    if not found:
        raise wanted.node.error(f"{published.path} has nothing of these services in these regions")
    if len(found) > PREFIXES_LIMIT:
        raise wanted.node.error(
            f"{len(found)} prefixes of {published.path}", f"at most {PREFIXES_LIMIT}: name services, regions or tags"
        )
    return tuple(found.values())


def _check_names(published: Published, named: Mapping[str, Node], kind: str, offered: set[str]) -> None:
    """Raise ConfigError for the first name that the list does not have."""
    offered.discard("")
    for name, node in named.items():
        if name in offered:
            continue
        if not offered:
            raise node.error(f"{published.path} tells no {kind}s apart", f"leave out {kind}s")
        near = nearest(name, offered)
        hint = f", did you mean {near[0]!r}?" if near else ""
        if len(offered) <= _SHOWN:
            allowed = ", ".join(sorted(offered))
        else:
            allowed = f"one of its {len(offered)} {kind}s" + (f", such as {', '.join(near)}" if near else "")
        raise node.error(f"{published.path} has no {kind} {name!r}{hint}", allowed)


def nearest(name: str, offered: Iterable[str], likeness: float = 0.5) -> list[str]:
    """Up to five of the names that are spelt much like `name`, in whatever case; the nearest first."""
    folded = {word.lower(): word for word in sorted(offered)}
    return [folded[word] for word in difflib.get_close_matches(name.lower(), list(folded), 5, likeness)]


def _network(path: str, entry: Entry, number: int) -> Network:
    text = entry.prefixes[number]
    net = _parsed(text)
    if net is None:
        raise ConfigError(path, entry.key, f"{text!r} is no CIDR, or has host bits set")
    if net.prefixlen == 0:
        raise ConfigError(path, entry.key, f"{text} is the whole internet, which no cloud owns")
    if isinstance(net, ipaddress.IPv6Network) and net.subnet_of(_MAPPED):
        raise ConfigError(path, entry.key, f"{text} is an IPv4 network in IPv6 clothes, which no packet has")
    return net


def _parsed(text: str) -> Network | None:
    if "%" in text or ("/" in text and not text.rpartition("/")[2].isdecimal()):
        return None  # Python would read zones and netmasks too
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


class _FormatError(Exception):
    """Something in the document is not as the format says: where, and what is there."""

    def __init__(self, key: str, found: str) -> None:
        super().__init__(found)
        self.key, self.found = key, found


def _aws(document: Any) -> Iterator[Entry]:
    for key, name in (("prefixes", "ip_prefix"), ("ipv6_prefixes", "ipv6_prefix")):
        for item, where in _items(document, key):
            text = _text(item, name, where)
            yield Entry((text,), _text(item, "service", where), _text(item, "region", where), "", f"{where}.{name}")


def _google(document: Any) -> Iterator[Entry]:
    for item, where in _items(document, "prefixes"):
        name = next((name for name in ("ipv4Prefix", "ipv6Prefix") if name in item), "")
        if not name:
            raise _FormatError(where, "neither ipv4Prefix nor ipv6Prefix")
        service, region = (_text(item, key, where) if key in item else "" for key in ("service", "scope"))
        yield Entry((_text(item, name, where),), service, region, "", f"{where}.{name}")


def _azure(document: Any) -> Iterator[Entry]:
    for item, where in _items(document, "values"):
        tag = _text(item, "name", where)
        properties = item.get("properties")
        inside = f"{where}.properties"
        if not isinstance(properties, dict):
            raise _FormatError(inside, f"{_kind(properties)} where a mapping is expected")
        prefixes = properties.get("addressPrefixes")
        if not isinstance(prefixes, list) or not all(isinstance(text, str) for text in prefixes):
            raise _FormatError(f"{inside}.addressPrefixes", "not a list of prefixes")
        # AzureCloud, which holds all others, is a tag whose systemService is empty.
        service, region = (
            _text(properties, k, inside) if properties.get(k) else "" for k in ("systemService", "region")
        )
        service = service or tag.partition(".")[0]
        yield Entry(tuple(prefixes), service, region, tag, f"{inside}.addressPrefixes")


FORMATS: Mapping[str, Callable[[Any], Iterator[Entry]]] = {"aws": _aws, "google": _google, "azure": _azure}
"""The formats, by the name that a policy gives them."""

_SHAPES = {
    "aws": "AWS's ip-ranges.json",
    "google": "Google's cloud.json or goog.json",
    "azure": "Azure's ServiceTags_*.json",
}

_MARKS: Mapping[str, Callable[[Any], bool]] = {
    "aws": lambda document: _has(document, "ipv6_prefixes"),
    "azure": lambda document: _has(document, "values"),
    "google": lambda document: _has(document, "prefixes") and not _has(document, "ipv6_prefixes"),
}
"""How a document of each format can be told from the others."""


def _has(document: Any, key: str) -> bool:
    return isinstance(document, dict) and isinstance(document.get(key), list)


def _items(document: Any, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The members of a list of mappings, each with where it stands."""
    if not isinstance(document, dict):
        raise _FormatError("", f"{_kind(document)} where a mapping is expected")
    if not isinstance(document.get(key), list):
        raise _FormatError(key, f"{_kind(document.get(key))} where a list is expected")
    for number, item in enumerate(document[key]):
        if not isinstance(item, dict):
            raise _FormatError(f"{key}[{number}]", f"{_kind(item)} where a mapping is expected")
        yield item, f"{key}[{number}]"


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _FormatError(f"{where}.{key}", f"{_kind(value)} where a string is expected")
    if not value.isprintable():
        raise _FormatError(f"{where}.{key}", f"{value!r} has characters that no name has")
    return value


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", type(None): "nothing"}
    return names.get(type(value), "a number")
