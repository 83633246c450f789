"""What the kernel has: modules, and the settings under /proc/sys.

Looking here loads no module and makes no table. Sources: modules.builtin and modules.dep (kbuild, depmod(8)),
/proc/modules (proc(5)), ip_tables_names and its like (net/netfilter/x_tables.c).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from netacct.doctor.facts import Modules

_NET = Path("/proc/thread-self/net")
_SYSCTL = Path("/proc/sys")
_BRIDGE = ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables")
_EXTENSIONS = {"set": "xt_set", "mark": "xt_mark", "multiport": "xt_multiport"}


def modules(root: Path = Path("/")) -> Modules:
    """What is known about modules; `root` is where /lib/modules, /boot and /proc/config.gz begin."""
    release = os.uname().release
    tree = root / "lib/modules" / release
    builtin, dependencies = _text(tree / "modules.builtin"), _text(tree / "modules.dep")
    configuration = _text(root / "boot" / f"config-{release}") or _unpacked(root / "proc/config.gz")
    return Modules(
        active=frozenset(_active()) | loaded(_text(Path("/proc/modules")) or ""),
        builtin=None if builtin is None else module_names(builtin),
        installed=None if dependencies is None else module_names(dependencies),
        config=None if configuration is None else options(configuration),
    )


def module_names(text: str) -> frozenset[str]:
    """The modules that modules.builtin or modules.dep lists: `kernel/net/netfilter/xt_set.ko.xz: …`."""
    paths = (line.partition(":")[0] for line in text.splitlines())
    return frozenset(path.rpartition("/")[2].partition(".ko")[0].replace("-", "_") for path in paths if path)


def loaded(text: str) -> frozenset[str]:
    """The modules that /proc/modules lists."""
    return frozenset(line.split(" ", 1)[0] for line in text.splitlines())


def options(text: str) -> dict[str, str]:
    """The options of a kernel configuration that are set: `CONFIG_IP_SET=m` gives IP_SET: m."""
    pairs = (line.removeprefix("CONFIG_").split("=", 1) for line in text.splitlines() if line.startswith("CONFIG_"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


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


def _active() -> Iterable[str]:
    for family, prefix in (("ip", "iptable"), ("ip6", "ip6table")):
        names = _text(_NET / f"{family}_tables_names")
        if names is not None:
            yield f"{family}_tables"
            yield from (f"{prefix}_{name}" for name in names.split())
    for extension in (_text(_NET / "ip_tables_matches") or "").split():
        if extension in _EXTENSIONS:
            yield _EXTENSIONS[extension]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _unpacked(path: Path) -> str | None:
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8")
    except FileNotFoundError:
        return None
