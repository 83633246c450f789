"""YAML (and so JSON) that a user wrote, as values that still know their file, line and key.

Only plain data is read: no tags but YAML's own, no aliases (a short file could stand for a huge one), no key twice,
bounded in size and depth. Scalars stay as written until somebody asks for a type, so that `name: on` or
`uid: 010` keep their spelling where a string is wanted (https://yaml.org/type/ would make a boolean and an 8 of them).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import yaml

from netacct import plainfile
from netacct.errors import ConfigError
from netacct.model import Network

SIZE_LIMIT = 8 << 20
"""Bytes; a policy of 8,000 CIDRs has 200 kB, a pods file of 4,096 addresses 1 MB."""

DEPTH_LIMIT = 32

_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN_TAGS = {"tag:yaml.org,2002:" + name for name in ("null", "bool", "int", "float", "timestamp", "str")}


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the file, with where it stands.

    Args:
        file: the path, as the user named it.
        key: the dotted path of the key, as in `classes.storage.cidrs[2]`; "" for the document.
        line: 1-based.
        value: a scalar's text as written, a mapping or a sequence of nodes; None where nothing is written (or `null`).
        quoted: whether a scalar is in quotes, and so a string whatever it looks like.
    """

    file: str
    key: str
    line: int
    value: str | Mapping[str, Node] | tuple[Node, ...] | None
    quoted: bool = False

    def error(self, found: str, allowed: str = "") -> ConfigError:
        """A ConfigError that names this place."""
        return ConfigError(self.file, self.key, found, allowed, self.line)

    def mapping(self, known: Collection[str] | None = None) -> Mapping[str, Node]:
        """The members; a missing value is an empty mapping. A key outside of `known` is an error naming the nearest."""
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            raise self.error(f"{self.kind} where a mapping is expected")
        for name in self.value:
            if known is not None and name not in known:
                raise self.unknown(name, known)
        return self.value

    def unknown(self, name: str, known: Collection[str]) -> ConfigError:
        """The error for a member of this mapping that is not among the `known` ones; names the nearest."""
        member = self.mapping()[name]
        near = difflib.get_close_matches(name, list(known), 1, 0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return member.error(f"unknown key{hint}", ", ".join(sorted(known)))

    def sequence(self) -> tuple[Node, ...]:
        """The items; a missing value is an empty sequence."""
        if self.value is None:
            return ()
        if not isinstance(self.value, tuple):
            raise self.error(f"{self.kind} where a list is expected")
        return self.value

    def string(self) -> str:
        """A scalar's text as written, quoted or not."""
        if not isinstance(self.value, str):
            raise self.error(f"{self.kind} where a string is expected")
        return self.value

    def choice(self, allowed: Collection[str]) -> str:
        """One of some words."""
        text = self.string()
        if text not in allowed:
            raise self.error(f"{text!r} is not a valid value", ", ".join(allowed))
        return text

    def boolean(self) -> bool:
        """`true`, `false`, `on`, `off`, `yes` or `no`, not in quotes."""
        word = _BOOLEANS.get(self.value.lower()) if isinstance(self.value, str) and not self.quoted else None
        if word is None:
            raise self.error(f"{self.shown} is not a boolean", "true, false, on, off, yes, no, without quotes")
        return word

    def integer(self, minimum: int, maximum: int) -> int:
        """A whole number, decimal, or hexadecimal after 0x; both limits are allowed values."""
        allowed = f"a whole number from {minimum} to {maximum}"
        try:
            number = int(self.value, 0) if isinstance(self.value, str) and not self.quoted else None
        except ValueError:
            number = None
        if number is None:
            raise self.error(f"{self.shown} is not a whole number", allowed)
        if not minimum <= number <= maximum:
            raise self.error(f"{self.value} is out of range", allowed)
        return number

    def seconds(self, minimum: float, maximum: float) -> float:
        """A duration such as `500ms`, `120s`, `5m`, `1h`, `2d`; a bare number is seconds."""
        text = self.value if isinstance(self.value, str) else ""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d|)", text)
        allowed = f"{duration(minimum)} to {duration(maximum)}, written as 500ms, 120s, 5m, 1h or a number of seconds"
        if match is None:
            raise self.error(f"{self.shown} is not a duration", allowed)
        value = float(match[1]) * _SECONDS[match[2]]
        if not minimum <= value <= maximum:
            raise self.error(f"{text} is out of range", allowed)
        return value

    def network(self) -> Network:
        """A CIDR, or a single address as /32 or /128. Host bits set are an error that names the canonical form."""
        if isinstance(self.value, Mapping) and any(":" in name for name in self.value):
            raise self.error("YAML reads the last colon as its own", 'an IPv6 address in quotes, as in "fd00::"')
        text = self.string()
        try:
            interface = ipaddress.ip_interface(text)
        except ValueError:
            raise self.error(f"{text!r} is no address and no CIDR") from None
        if getattr(interface, "scope_id", None):
            raise self.error(f"{text!r} has a zone, and addresses here are of the whole node")
        # Python also reads 10.0.0.0/255.0.0.0 (and, the other way round, /0.255.255.255); nobody means the latter.
        if "/" in text and not text.rpartition("/")[2].isdecimal():
            raise self.error(f"{text!r} has no prefix length after the slash", str(interface.network))
        if interface.ip != interface.network.network_address:
            raise self.error(f"{text!r} has host bits set", str(interface.network))
        return interface.network

    @property
    def kind(self) -> str:
        """What stands here, in words."""
        if isinstance(self.value, str):
            return f"{self.value!r}"
        return "nothing" if self.value is None else "a mapping" if isinstance(self.value, Mapping) else "a list"

    @property
    def shown(self) -> str:
        """The value as it may be shown in a message about its type."""
        return f"the string {self.value!r}" if self.quoted else self.kind


def duration(seconds: float) -> str:
    """The shortest way to write so many seconds that `Node.seconds` reads back: `90s`, `5m`, `1h`."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def load(path: str) -> Node:
    """Read and parse a file. Raises ConfigError as `read` and `parse` do."""
    return parse(read(path), path)


def read(path: str) -> bytes:
    """A file's content, up to a byte over SIZE_LIMIT. Raises ConfigError, with the OSError as its `__cause__`.

    A pipe in the place of a file is refused: an agent would wait for whoever writes into it. Below /dev, where shells
    have their own (`/dev/stdin`, `<(…)`), it is what the user meant.
    """
    opener = None if path.startswith("/dev/") else plainfile.opener
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from error


def parse(data: bytes, path: str) -> Node:
    """The document in `data`; an empty one has the value None. `path` is only for messages.

    Raises ConfigError for what is not UTF-8, not YAML, too large or deep, several documents, a key twice or not a
    string, a tag, an alias.
    """
    if len(data) > SIZE_LIMIT:
        raise ConfigError(path, "", f"larger than {SIZE_LIMIT >> 20} MiB")
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=_LOADER)
    except UnicodeDecodeError as error:
        raise ConfigError(path, "", f"is not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ConfigError(path, "", "is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = None if mark is None else mark.line + 1
        hint = "" if line is None else _address_hint(text.splitlines()[line - 1 : line])
        raise ConfigError(path, "", f"is not valid YAML: {problem}{hint}", line=line) from error
    if root is None:
        return Node(path, "", 1, None)
    return _Reader(path, text).convert(root, "", 0)


def _address_hint(lines: Iterable[str]) -> str:
    """What to do where YAML takes the colons of an IPv6 address for its own: at its begin in a list, at its end."""
    bare = any(re.search(r"(?:[\[,{]\s*|^[^\"']*[0-9A-Fa-f])::(?:[\s,\]}/0-9A-Fa-f]|$)", line) for line in lines)
    return '; an IPv6 address that begins or ends with a colon goes in quotes, as in "fd00::"' if bare else ""


class _Reader:
    """Turns PyYAML's nodes into ours, once each."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.seen: set[int] = set()

    def convert(self, node: yaml.Node, key: str, depth: int) -> Node:
        line = node.start_mark.line + 1
        if id(node) in self.seen:
            raise ConfigError(self.path, key, "aliases are not supported", "the value itself", self.first_alias())
        if depth > DEPTH_LIMIT:
            raise ConfigError(self.path, "", "is nested too deeply", f"{DEPTH_LIMIT} levels", line)
        self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return Node(self.path, key, line, self.members(node, key, depth))
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = enumerate(node.value)
            return Node(self.path, key, line, tuple(self.convert(x, f"{key}[{i}]", depth + 1) for i, x in items))
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS:
            quoted = node.style is not None and node.style != ""
            nothing = node.tag == "tag:yaml.org,2002:null" and not quoted
            return Node(self.path, key, line, None if nothing else node.value, quoted)
        raise ConfigError(self.path, key, f"the tag {node.tag} is not supported", "plain values", line)

    def first_alias(self) -> int:
        """The line of the file's first alias; composing forgets where aliases stand, and the anchor's would mislead."""
        tokens = yaml.scan(self.text, Loader=_LOADER)
        line: int = next(token.start_mark.line for token in tokens if isinstance(token, yaml.AliasToken))
        return line + 1

    def members(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise ConfigError(self.path, key, "has a key that is not a string", line=line)
            path = f"{key}.{name.value}" if key else name.value
            if name.value == "<<" and not name.style:
                raise ConfigError(self.path, path, "merge keys are not supported", "the keys themselves", line)
            if name.value in found:
                raise ConfigError(self.path, path, f"is given twice, first in line {found[name.value].line}", line=line)
            member = self.convert(value, path, depth + 1)
            # A value that starts on a later line is still found by its key.
            found[name.value] = Node(self.path, path, line, member.value, member.quoted)
        return found
