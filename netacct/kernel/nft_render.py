"""A layout as text for `nft -f`, in the forms that nft(8) turns into the same expressions as ours. Pure.

A /24 is written as a comparison of four bytes, and IPv6 prefixes word by word: what `nft list` prints instead would be
slower, given back to it (`nft_expressions.py` says why).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from netacct.kernel import nft_parts as parts
from netacct.kernel.layout import SENTINEL
from netacct.kernel.nft_many import Content, width_in_set, width_of
from netacct.kernel.nft_messages import TABLE
from netacct.kernel.nft_parts import HOOK_NAMES, Chain, CounterSet, Layout
from netacct.model import Address, Family, Network, Scope, unpack

_EPOCH = 1
_WORD = 32
_WHOLE_WORD = 0xFFFFFFFF
_OFFSETS = {"src": 64, "dst": 192}
"""Where an IPv6 header has its addresses, in bits."""
_OFFSETS_4 = {"src": 96, "dst": 128}


def text(layout: Layout, prefilled: Sequence[Address], epoch: int = _EPOCH) -> str:
    """Input for `nft -f` that makes the table of one family, with all counters at 0.

    Args:
        layout: what to write.
        prefilled: the addresses that have counters from the start.
        epoch: the number that stands where the agent puts a random one: in sentinels and in names of counters.
    """
    return "\n".join([f"table {_table(layout.family)} {{", *_body(layout, prefilled, epoch), "}", ""])


def shortened(ruleset: str, most: int = 6) -> str:
    """What `text` made, for people: of more than `most` elements only the first, and how many there are."""
    return "\n".join(_shortened(line, most) for line in ruleset.split("\n"))


def _shortened(line: str, most: int) -> str:
    head, begin, rest = line.partition("elements = { ")
    elements = rest.removesuffix(" }").split(", ")
    if not begin or len(elements) <= most:
        return line
    return f"{head}{begin}{', '.join(elements[:most])}, … }}  # {len(elements)} in all"


def facts(layout: Layout) -> dict[str, list[str]]:
    """The rules, each behind the name of its chain, and the names of sets, maps and counters."""
    rules = [f"{chain.name} {rule_text(rule, layout.family)}" for chain in layout.chains for rule in chain.rules]
    sets = [*(one.name for one in layout.sets), *(one.name for one in layout.contents)]
    return {"rules": rules, "sets": sets, "counters": [one.name for one in layout.counters]}


def removal_text(families: Iterable[Family]) -> str:
    """Input for `nft -f` that removes the tables."""
    return "".join(f"delete table {_table(family)}\n" for family in families)


def rule_text(rule: parts.Rule, family: Family, epoch: int = _EPOCH) -> str:
    """One rule as nft(8) takes it."""
    return " ".join(_part(part, family, epoch) for part in rule)


def _table(family: Family) -> str:
    return f"{'ip' if family == 4 else 'ip6'} {TABLE}"


def _body(layout: Layout, prefilled: Sequence[Address], epoch: int) -> list[str]:
    lines = [f"\tcounter {_counter(counter.name, epoch)} {{ }}" for counter in layout.counters]
    for spec in layout.sets:
        lines += _set(spec, prefilled, epoch)
    for content in layout.contents:
        lines += _content(content, layout.family)
    for chain in layout.chains:
        lines += _chain(chain, layout.family, epoch)
    return lines


def _counter(name: str, epoch: int) -> str:
    return f"{name}.{epoch:06d}"


def _set(spec: CounterSet, prefilled: Sequence[Address], epoch: int) -> list[str]:
    family = spec.key.family
    if spec.key.scope is Scope.HOST_POD:  # nft(8) takes paths of cgroups only, not their numbers, nor a sentinel
        return [f"\tset {spec.name} {{", "\t\ttype cgroupsv2", f"\t\tsize {spec.size}", "\t\tcounter", "\t}"]
    flags = ["\t\tflags dynamic"] if spec.dynamic else []
    sentinel = f"{unpack(SENTINEL[family])} counter packets 1 bytes {epoch}"
    elements = ", ".join([*(f"{unpack(ip)} counter" for ip in prefilled), sentinel])
    head = [f"\tset {spec.name} {{", f"\t\ttype {_type(family)}", f"\t\tsize {spec.size}"]
    return [*head, *flags, "\t\tcounter", f"\t\telements = {{ {elements} }}", "\t}"]


def _content(content: Content, family: Family) -> list[str]:
    whole = content.width == (4 if family == 4 else 16)
    kind = f"type {_type(family)}" if whole else f"typeof {_raw(64, content.width)}"
    keys = [str(ipaddress.ip_address(key)) if whole else f"0x{key.hex()}" for key in content.keys]
    if content.chains:
        entries = [f"{key} : goto {chain}" for key, chain in zip(keys, content.chains, strict=True)]
        head = [f"\tmap {content.name} {{", f"\t\t{kind} : verdict"]
    else:
        entries, head = keys, [f"\tset {content.name} {{", f"\t\t{kind}"]
    return [*head, f"\t\tsize {len(keys)}", f"\t\telements = {{ {', '.join(entries)} }}", "\t}"]


def _chain(chain: Chain, family: Family, epoch: int) -> list[str]:
    hook = []
    if chain.hook is not None:
        name = HOOK_NAMES[chain.hook.number]
        hook = [f"\t\ttype {chain.hook.type} hook {name} priority {chain.hook.priority}; policy accept;"]
    rules = [f"\t\t{rule_text(rule, family, epoch)}" for rule in chain.rules]
    return [f"\tchain {chain.name} {{", *hook, *rules, "\t}"]


def _type(family: Family) -> str:
    return "ipv4_addr" if family == 4 else "ipv6_addr"


def _raw(offset: int, width: int) -> str:
    return f"@nh,{offset},{8 * width}"


def _part(part: parts.Part, family: Family, epoch: int) -> str:
    match part:
        case parts.Prefix() | parts.Member() | parts.Choose() | parts.CountAt() | parts.CountOf() | parts.AddTo():
            return _address(part, family)
        case parts.Jump(chain):
            return f"jump {chain}"
        case parts.Goto(chain):
            return f"goto {chain}"
        case parts.Return():
            return "return"
        case parts.Tally(name):
            return f'counter name "{_counter(name, epoch)}"'
        case _:
            return _property(part)


def _address(
    part: parts.Prefix | parts.Member | parts.Choose | parts.CountAt | parts.CountOf | parts.AddTo, family: Family
) -> str:
    match part:
        case parts.Prefix(side, network):
            return _prefix(side, network)
        case parts.Member(side, content, length):
            return f"{_cut(side, family, length, leads=False)} @{content}"
        case parts.Choose(side, content, length):
            return f"{_cut(side, family, length, leads=True)} vmap @{content}"
        case parts.CountAt(side, name):
            return f"{_end(side, family)} @{name}"
        case parts.CountOf(level, name):
            return f"socket cgroupv2 level {level} @{name}"
        case parts.AddTo(side, name):
            return f"add @{name} {{ {_end(side, family)} counter }}"


def _property(part: parts.NotLoopback | parts.Protocol | parts.UdpPort | parts.Mark) -> str:
    match part:
        case parts.NotLoopback(way):
            return f'{way} != "lo"'
        case parts.Protocol(number):
            return f"meta l4proto {number}"
        case parts.UdpPort(port):
            return f"th dport {port}"
        case parts.Mark(value, mask):
            others = ~mask & _WHOLE_WORD
            return f"meta mark & {mask:#x} == 0 meta mark set meta mark & {others:#x} | {value:#x}"


def _end(side: parts.Side, family: Family) -> str:
    return f"{'ip' if family == 4 else 'ip6'} {'saddr' if side == 'src' else 'daddr'}"


def _prefix(side: parts.Side, network: Network) -> str:
    length = network.prefixlen
    if network.version == 4:
        if length in (8, 16, 32):
            return f"ip {side[0]}addr {network}"
        return f"ip {side[0]}addr & {network.netmask} == {network.network_address}"
    words = []
    for at in reversed(range(0, length, _WORD)):
        word = int(network.network_address) >> (128 - _WORD - at) & _WHOLE_WORD
        words.append(_word(_OFFSETS[side] + at, word, min(length - at, _WORD)))
    return " ".join(words)


def _word(offset: int, word: int, length: int) -> str:
    if length in (8, 16, 32):
        return f"@nh,{offset},{length} {word >> _WORD - length:#x}"
    mask = _WHOLE_WORD << (_WORD - length) & _WHOLE_WORD
    return f"@nh,{offset},32 & {mask:#x} == {word:#x}"


def _cut(side: parts.Side, family: Family, length: int, *, leads: bool) -> str:
    """The first bits of an address, as a key of a map (which leads somewhere) or of a set."""
    bits = 32 if family == 4 else 128
    width = width_of(length, bits) if leads else width_in_set(length, bits)
    mask = ((1 << length) - 1) << (8 * width - length)
    if family == 4 and width == 2:
        return _raw(_OFFSETS_4[side], width)
    if family == 4:
        end = _end(side, family)
        return end if length == bits else f"{end} & {ipaddress.IPv4Address(mask)}"
    load = _end(side, family) if width == bits // 8 else _raw(_OFFSETS[side], width)
    shown = str(ipaddress.IPv6Address(mask)) if width == bits // 8 else f"{mask:#x}"
    return load if length == 8 * width else f"{load} & {shown}"
