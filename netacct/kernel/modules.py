"""Which modules this kernel has, or could load, told without loading one.

Asking netfilter by netlink loads what is asked for, and so does making a legacy table; the files here do not. Sources:
modules.builtin and modules.dep (kbuild, depmod(8)), /proc/modules (proc(5)), ip_tables_names and its like
(net/netfilter/x_tables.c), /sys/module (a module that has parameters is there also when it is built in).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "iptables": {
        "ip_tables": ("IP_NF_IPTABLES_LEGACY", "IP_NF_IPTABLES"),
        "ip6_tables": ("IP6_NF_IPTABLES_LEGACY", "IP6_NF_IPTABLES"),
        "iptable_mangle": ("IP_NF_MANGLE",),
        "ip6table_mangle": ("IP6_NF_MANGLE",),
        "ip_set": ("IP_SET",),
        "ip_set_hash_ip": ("IP_SET_HASH_IP",),
        "ip_set_hash_net": ("IP_SET_HASH_NET",),
        "ip_set_bitmap_ip": ("IP_SET_BITMAP_IP",),
        "xt_set": ("NETFILTER_XT_SET",),
        "xt_mark": ("NETFILTER_XT_MARK",),
        "xt_multiport": ("NETFILTER_XT_MATCH_MULTIPORT",),
    },
    "nftables": {"nf_tables": ("NF_TABLES",)},
}
"""By datapath: the modules that its rules need, and the options that build them in; of several options, the first that
this kernel knows decides. The target SET comes with xt_set, MARK with xt_mark."""

HOST_PODS: Mapping[str, tuple[str, ...]] = {"nft_socket": ("NFT_SOCKET",)}
"""As in `NEEDED`: what the rules of `host_pods: cgroup` need beyond nf_tables."""

HOST_PODS_OPTION = "SOCK_CGROUP_DATA"
"""And what must be built in, so that sockets know their cgroup."""

_OPTIONS = {module: options for some in (*NEEDED.values(), HOST_PODS) for module, options in some.items()}
_NET = Path("/proc/thread-self/net")
_SYS = Path("/sys/module")
_EXTENSIONS = {"set": "xt_set", "mark": "xt_mark", "multiport": "xt_multiport"}


@dataclass(frozen=True, slots=True)
class Modules:
    """What is known about the kernel's modules, names with `_`. None: that source is not there.

    active:    loaded or built in, as /proc and /sys show by use.
    builtin, installed: of /lib/modules/RELEASE (modules.builtin, modules.dep).
    config:    the kernel's own configuration, CONFIG_ left out; unset options are not in it.
    """

    active: frozenset[str] = frozenset()
    builtin: frozenset[str] | None = None
    installed: frozenset[str] | None = None
    config: Mapping[str, str] | None = None

    def lacks(self, name: str) -> bool:
        """Whether it is certain that a module of `NEEDED` or `HOST_PODS` cannot be had; no source, no certainty."""
        files = (self.builtin or frozenset()) | (self.installed or frozenset())
        if name in self.active or name in files:
            return False
        if self.installed is not None:
            # a kernel may have things built in that its modules.builtin does not list under this name
            return self._option(name) != "y"
        return self.config is not None and not self._option(name)

    def sleeps(self, name: str) -> bool:
        """Whether it is certain that a module of `NEEDED` is not loaded now, so that nothing of it is in use."""
        if name in self.active or name in (self.builtin or ()):
            return False
        return self.lacks(name) or (self.installed is not None and name in self.installed)

    def unset(self, option: str) -> bool:
        """Whether it is certain that the kernel was built without an option."""
        return self.config is not None and option not in self.config

    def _option(self, name: str) -> str:
        """`y` or `m`, "" where the option is unset or the configuration is not known."""
        config = self.config or {}
        return next((config[option] for option in _OPTIONS[name] if option in config), "")


def look(root: Path = Path("/")) -> Modules:
    """What is known about modules; `root` is where /lib/modules, /boot and /proc/config.gz begin."""
    release = os.uname().release
    tree = root / "lib/modules" / release
    builtin, dependencies = _text(tree / "modules.builtin"), _text(tree / "modules.dep")
    configuration = _text(root / "boot" / f"config-{release}") or _unpacked(root / "proc/config.gz")
    return Modules(
        active=frozenset(_active()) | loaded(_text(Path("/proc/modules")) or ""),
        builtin=None if builtin is None else module_names(builtin),
        installed=None if dependencies is None else module_names(dependencies),
        config=options(configuration or "") or None,  # an empty file tells nothing either
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


def _active() -> Iterable[str]:
    for family, prefix in (("ip", "iptable"), ("ip6", "ip6table")):
        names = _text(_NET / f"{family}_tables_names")
        if names is not None:
            yield f"{family}_tables"
            yield from (f"{prefix}_{name}" for name in names.split())
    for extension in (_text(_NET / "ip_tables_matches") or "").split():
        if extension in _EXTENSIONS:
            yield _EXTENSIONS[extension]
    yield from (name for name in _OPTIONS if (_SYS / name).is_dir())


def _text(path: Path) -> str | None:
    """What a file says; None where there is none, and where it is hidden, as ProtectKernelModules= of a unit does."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _unpacked(path: Path) -> str | None:
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        return None
