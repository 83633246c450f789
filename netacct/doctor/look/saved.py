"""Files that load a ruleset at boot, and have something of ours in them: somebody saved what ran."""

from __future__ import annotations

import re
from pathlib import Path

_PATTERNS = (
    "etc/nftables.conf",  # Debian, Arch
    "etc/nftables/*.nft",
    "etc/nftables.d/*.nft",
    "etc/sysconfig/nftables.conf",  # Red Hat
    "etc/iptables/rules.v[46]",  # iptables-persistent
    "etc/iptables/ip*tables.rules",  # Arch
    "etc/sysconfig/ip*tables",  # iptables-services
)
_OURS = re.compile(rb"^(?:[^#\n]*\bNETACCT-|[ \t]*table ip6? netacct\b)", re.MULTILINE)
"""As what ran is listed; who writes `destroy table ip netacct` leaves ours out."""


def rulesets(root: Path = Path("/")) -> tuple[str, ...]:
    """The files in which chains or tables of ours stand. Errors: OSError."""
    files = (path for pattern in _PATTERNS for path in sorted(root.glob(pattern)))
    return tuple(f"/{path.relative_to(root)}" for path in files if path.is_file() and _OURS.search(path.read_bytes()))
