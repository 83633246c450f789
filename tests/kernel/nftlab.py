"""Changes a table of the nftables datapath behind its back, as its owner: for tests that set counters from outside."""

from __future__ import annotations

from netacct.kernel import nft_messages as nft
from netacct.kernel import nft_sets
from netacct.kernel.netlink import attribute, attributes, nested
from netacct.kernel.nft_messages import Message
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import Address, CounterKey, Family, Scope


def kernel_name(datapath: NftablesDatapath, key: CounterKey) -> str:
    """The kernel's name of a counter set or counter."""
    present = nft_sets.look(datapath._reader, key.family)
    (name,) = [name for name in present.counting() if nft_sets.key_of(key.family, name) == key]
    return name


def set_count(datapath: NftablesDatapath, key: CounterKey, ip: Address, octets: int, packets: int) -> None:
    """Let a counter be at so many bytes and packets."""
    name = kernel_name(datapath, key)
    if key.scope in (Scope.POD, Scope.HOST_POD):
        counted = nft.element(ip, nft.counted_from(octets, packets))
        deleted = nft.delete_elements(key.family, name, [nft.element(ip)])
        datapath._open().commit([*deleted, *nft.new_elements(key.family, name, [counted])])
        return
    values = attribute(nft.COUNTER_BYTES, nft.u64(octets)) + attribute(nft.COUNTER_PACKETS, nft.u64(packets))
    body = attribute(nft.OBJECT_TABLE, nft.text(nft.TABLE)) + attribute(nft.OBJECT_NAME, nft.text(name))
    body += attribute(nft.OBJECT_TYPE, nft.u32(nft.OBJECT_COUNTER)) + nested(nft.OBJECT_DATA, values)
    made = Message(nft.NEW_OBJECT, 0x400, key.family, body, f"make counter {name}")
    chain = name.rpartition(".")[0]
    rules = _rules(datapath, key.family, chain)
    datapath._open().commit([nft.flush_chain(key.family, chain), nft.delete_counter(key.family, name), made, *rules])


def flush(datapath: NftablesDatapath, key: CounterKey) -> None:
    """Empty a counter set; delete a counter, with the rules that count in it."""
    name = kernel_name(datapath, key)
    if key.scope in (Scope.POD, Scope.HOST_POD):
        body = attribute(nft.ELEMENTS_TABLE, nft.text(nft.TABLE)) + attribute(nft.ELEMENTS_SET, nft.text(name))
        datapath._open().commit([Message(nft.DEL_ELEMENTS, 0, key.family, body, f"flush set {name}")])
        return
    chain = name.rpartition(".")[0]
    datapath._open().commit([nft.flush_chain(key.family, chain), nft.delete_counter(key.family, name)])


def _rules(datapath: NftablesDatapath, family: Family, chain: str) -> list[Message]:
    """The rules of a chain, to be made again as they are."""
    found = datapath._reader.rules(family)[chain]
    several = [[bytes(value) for kind, value in attributes(rule) if kind == nft.LIST_ELEMENT] for rule in found]
    return [nft.new_rule(family, chain, expressions) for expressions in several]
