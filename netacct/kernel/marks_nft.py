"""Who changes marks in nftables: a raw dump of chains and rules, in which iptables-nft's rules are too.

`nft -j` prints the xt targets of iptables-nft without their parameters and may not be installed; the kernel sends them
as they are. Numbers: linux/netfilter/nfnetlink.h, nf_tables.h, nf_tables_compat.h.
"""

from __future__ import annotations

import errno

from netacct.kernel.layout import CHAIN_PREFIX
from netacct.kernel.mark_bits import Expression, Writer, expression_bits
from netacct.kernel.netlink import Netlink, NetlinkError, attributes

OWN_TABLE = "netacct"
"""The nftables table of ours, whose rules are no conflict."""

_NFTABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
_GET_CHAIN, _GET_RULE = _NFTABLES | 4, _NFTABLES | 7
_CHAIN_TABLE, _CHAIN_NAME = 1, 3
_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_EXPRESSION_NAME, _EXPRESSION_DATA = 1, 2
_WRITES_MARKS = (b"meta\0", b"target\0")
_NO_NFTABLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOENT)


def read() -> tuple[list[Writer], set[str]]:
    """Every foreign rule that changes marks, and the names of all foreign chains, in this network namespace.

    Raises:
        DatapathError: the ruleset is there but could not be read.
    """
    with Netlink() as link:
        try:
            chains = link.dump(_GET_CHAIN, 0, b"")
            rules = link.dump(_GET_RULE, 0, b"")
        except NetlinkError as error:
            if error.code in _NO_NFTABLES:
                return [], set()
            raise
    return [writer for rule in rules if (writer := _writer(rule))], {
        name for chain in chains if (name := _chain(chain))
    }


def _chain(message: memoryview) -> str:
    """The name of a foreign chain, "" for one of ours."""
    parts = dict(attributes(message))
    table, name = _text(parts[_CHAIN_TABLE]), _text(parts[_CHAIN_NAME])
    return "" if table == OWN_TABLE or name.startswith(CHAIN_PREFIX) else name


def _writer(message: memoryview) -> Writer | None:
    # Thousands of kube-proxy's rules have neither expression; taking them apart would be the scan's whole cost.
    octets = bytes(message)
    if not any(word in octets for word in _WRITES_MARKS):
        return None
    parts = dict(attributes(message))
    table, chain = _text(parts[_RULE_TABLE]), _text(parts[_RULE_CHAIN])
    if table == OWN_TABLE or chain.startswith(CHAIN_PREFIX) or _RULE_EXPRESSIONS not in parts:
        return None
    bits = expression_bits(_expression(value) for _, value in attributes(parts[_RULE_EXPRESSIONS]))
    return Writer(f"nftables table {table} chain {chain}", bits) if bits else None


def _expression(value: memoryview) -> Expression:
    parts = dict(attributes(value))
    data = parts.get(_EXPRESSION_DATA, memoryview(b""))
    return Expression(_text(parts[_EXPRESSION_NAME]), {kind: bytes(part) for kind, part in attributes(data)})


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("utf-8", "replace")
