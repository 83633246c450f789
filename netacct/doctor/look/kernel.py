"""What the kernel has besides modules (`kernel/modules.py`): the settings under /proc/sys, services of IPVS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_NET = Path("/proc/thread-self/net")
_SYSCTL = Path("/proc/sys")
_BRIDGE = ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables")


def sysctls() -> Mapping[str, int]:
    """The settings that the checks look at, as sysctl(8) names them; those that are missing are left out."""
    found = {f"net.bridge.{name}": _SYSCTL / "net/bridge" / name for name in _BRIDGE}
    for directory in sorted((_SYSCTL / "net/ipv4/conf").iterdir()):
        for name in ("rp_filter", "src_valid_mark"):
            found[f"net.ipv4.conf.{directory.name}.{name}"] = directory / name
    return {key: int(text) for key, path in found.items() if (text := _text(path)) is not None}


def virtual_services() -> int:
    """How many services IPVS has here; see `count_services`."""
    return count_services(_text(_NET / "ip_vs") or "")


def count_services(text: str) -> int:
    """The virtual services in /proc/net/ip_vs: lines that begin with a protocol or FWM (ip_vs_ctl.c)."""
    return sum(line.split(" ", 1)[0] in ("TCP", "UDP", "SCTP", "FWM") for line in text.splitlines())


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
