"""What RDMA adapters count themselves: RDMA passes no netfilter hook and has no pod's address.

Formats: Documentation/ABI/stable/sysfs-class-infiniband in the kernel. `counters/port_rcv_data` and `port_xmit_data`
are in units of four bytes. Adapters without those (AWS EFA, drivers/infiniband/hw/efa/efa_verbs.c) have `rx_bytes` and
`tx_bytes` in `hw_counters`, in bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from netacct.model import Direction

ROOT = "/sys/class/infiniband"

_FILES = {
    Direction.RECEIVE: (("counters/port_rcv_data", 4), ("hw_counters/rx_bytes", 1)),
    Direction.TRANSMIT: (("counters/port_xmit_data", 4), ("hw_counters/tx_bytes", 1)),
}
"""Where a port's counter is, and how many bytes one unit of it is; the first that can be read counts."""

_STUCK = 0xFFFFFFFF
"""Where the oldest adapters' counters of 32 bits stop (InfiniBand's PortCounters saturate): no count any more."""


class PortBytes(NamedTuple):
    """What one port moved in one direction since its driver was loaded, or somebody reset it."""

    device: str
    port: str
    direction: Direction
    bytes: int


def read(root: str = ROOT) -> tuple[PortBytes, ...]:
    """All ports of all adapters, sorted. What cannot be read is left out; without adapters there is nothing."""
    found: list[PortBytes] = []
    for device in _names(Path(root)):
        ports = Path(root) / device / "ports"
        for port in sorted(_names(ports), key=lambda name: (len(name), name)):
            for direction, files in _FILES.items():
                values = (_value(ports / port / file, unit) for file, unit in files)
                first = next((value for value in values if value is not None), None)
                if first is not None:
                    found.append(PortBytes(device, port, direction, first))
    return tuple(found)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 -- names are wanted, not paths
    except OSError:
        return []


def _value(path: Path, unit: int) -> int | None:
    try:
        text = path.read_bytes().strip()
    except OSError:
        return None
    # Some drivers write words (`N/A (no PMA)`) where an adapter cannot count.
    if not text.isdigit() or len(text) > 20 or int(text) == _STUCK:
        return None
    return int(text) * unit
