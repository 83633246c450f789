"""Chains, rules, maps and sets that do not count, of one family's table: what changes them, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from netacct.kernel import nft_messages as nft
from netacct.kernel.nft_expressions import encode, same
from netacct.kernel.nft_many import Content
from netacct.kernel.nft_messages import SET_MAP, Message, element, leads_to
from netacct.kernel.nft_parts import Chain, Layout
from netacct.kernel.nft_reader import NftReader
from netacct.kernel.nft_sets import Present
from netacct.model import Family


def made_before(reader: NftReader, layout: Layout) -> list[Message]:
    """Makes the chains that are missing, but for base chains: maps lead to them."""
    chains = [chain for chain in layout.chains if chain.hook is None]
    missing = [chain for chain in chains if reader.hook(layout.family, chain.name) == "missing"]
    return [nft.new_chain(layout.family, chain.name, None) for chain in missing]


def fill(reader: NftReader, family: Family, content: Content, present: Present) -> Iterator[Message]:
    """Makes a set or map hold what it should; nothing where it does."""
    found: dict[bytes, bytes] = {}
    if content.name in present.others:
        found = reader.elements(family, content.name) or {}
    else:
        flags = SET_MAP if content.chains else 0
        yield nft.new_set(family, content.name, content.width, len(content.keys), flags, counts=False)
    wanted = dict(zip(content.keys, content.chains or [""] * len(content.keys), strict=True))
    leads = {data: nft.goes_to(data) for data in {*found.values()}}  # few chains, many elements
    wrong = {key for key, data in found.items() if leads[data] != wanted.get(key)}
    yield from nft.delete_elements(family, content.name, map(element, wrong))
    data = {chain: leads_to(chain) if chain else b"" for chain in {*wanted.values()}}
    missing = (element(key, data[chain]) for key, chain in wanted.items() if key not in found or key in wrong)
    yield from nft.new_elements(family, content.name, missing)


def changes(reader: NftReader, layout: Layout, names: Mapping[str, str], present: Present) -> list[Message]:
    """What makes chains and rules what they should be, to be done as one transaction; nothing where they are.

    Args:
        reader: of this namespace.
        layout: what should be.
        names: the kernel's names of counter sets and counters.
        present: what is.
    """
    family = layout.family
    stale = [name for name in present.rules if name not in {chain.name for chain in layout.chains}]
    contents = {content.name for content in layout.contents}
    before: list[Message] = []
    rules: list[Message] = []
    for chain in layout.chains:
        encoded = [encode(rule, family, names) for rule in chain.rules]
        hook = reader.hook(family, chain.name)
        if hook == (chain.hook or "") and _same(encoded, present, chain):
            continue
        if hook != "missing":
            before.append(nft.flush_chain(family, chain.name))
        if hook not in ("missing", chain.hook or ""):
            before.append(nft.delete_chain(family, chain.name))
        if hook != (chain.hook or ""):
            before.append(nft.new_chain(family, chain.name, chain.hook))
        rules += [nft.new_rule(family, chain.name, one) for one in encoded]
    return [
        *before,
        *(nft.flush_chain(family, name) for name in stale),
        *(nft.delete_set(family, name) for name in present.others if name not in contents),
        *rules,
        *(nft.delete_chain(family, name) for name in stale),
    ]


def differences(reader: NftReader, layout: Layout, names: Mapping[str, str], present: Present) -> list[str]:
    """What is wrong with chains, rules and the sets that do not count, in words."""
    family = layout.family
    counting = [spec.name for spec in layout.sets] + [spec.name for spec in layout.counters]
    names = {name: names.get(name, name) for name in counting}
    contents = {content.name: content for content in layout.contents}
    wanted = {chain.name for chain in layout.chains}
    found = [f"set {name} is left over" for name in present.others if name not in contents]
    found += [f"chain {name} is left over" for name in present.rules if name not in wanted]
    for name, content in contents.items():
        if name not in present.others:
            found.append(f"set {name} is missing")
        elif any(fill(reader, family, content, present)):
            found.append(f"set {name} holds something else than ours")
    for chain in layout.chains:
        hook = reader.hook(family, chain.name)
        if hook == "missing":
            found.append(f"chain {chain.name} is missing")
        elif hook != (chain.hook or ""):
            found.append(f"chain {chain.name} hangs elsewhere than ours, or has another policy")
        elif not _same([encode(rule, family, names) for rule in chain.rules], present, chain):
            found.append(f"chain {chain.name} has other rules than ours")
    return found


def _same(wanted: list[list[bytes]], present: Present, chain: Chain) -> bool:
    found = present.rules.get(chain.name, [])
    return len(wanted) == len(found) and all(same(one, other) for one, other in zip(wanted, found, strict=True))
