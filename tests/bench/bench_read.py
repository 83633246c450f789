"""Reading all counters: our reader beside the two that one would write first."""

from __future__ import annotations

import functools
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import bench_stats
from bench_lane import GATEWAY, NODE
from bench_netns import Namespace
from bench_product import Setup
from bench_stats import LEAST_SAMPLES, Figure
from bench_variants import LOCAL_20, LOCAL_24, write_policy
from pyroute2 import IPSet

from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.layout import SET_PREFIX
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import Scope, Snapshot, pack

OURS, IPSET_SAVE, PYROUTE2 = "netacct", "ipset save, parsed", "pyroute2 IPSet.list"
NFTABLES = "netacct, nftables"
ELEMENT = re.compile(r"^add (\S+) (\S+) packets (\d+) bytes (\d+)", re.MULTILINE)


ADD = "a pod added"
ADD_MILLISECONDS = 1.0


class Case(NamedTuple):
    """How much is read; `milliseconds` is what ours may take, `nftables` what it may take there."""

    counters: int
    local: str
    milliseconds: float
    nftables: float
    readings: int


CASES = (Case(2560, LOCAL_24, 2.0, 3.0, 201), Case(40960, LOCAL_20, 40.0, 45.0, 51))


def measure(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each reading, by number of counters and reader."""
    policy = write_policy(folder / "read.yaml")
    samples = {}
    for case in CASES:
        node = Namespace()
        setup = Setup(policy, [case.local], [NODE, GATEWAY])
        samples[f"{case.counters:,}"] = node.call(functools.partial(_readings, case, setup))
        node.close()
        node = Namespace()
        readings = node.call(functools.partial(_nft_readings, case, replace(setup, datapath="nftables")))
        samples[f"{case.counters:,}"] |= readings
        node.close()
    return samples


def figures(samples: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """The rows of the result."""
    rows = []
    for case in CASES:
        name = f"{case.counters:,}"
        ours = bench_stats.interval(samples[name][OURS])
        rows.append(_figure(f"read {name} counters", samples[name][OURS], threshold=case.milliseconds))
        for reader in (IPSET_SAVE, PYROUTE2):
            times = bench_stats.interval(samples[name][reader]).median / ours.median
            rows.append(_figure(f"the same by {reader}", samples[name][reader], f"{times:.1f} times ours"))
        rows.append(_figure(f"read {name} counters, nftables", samples[name][NFTABLES], threshold=case.nftables))
        added = samples[name][ADD]
        rows.append(_figure(f"{ADD}, nftables, beside {name} counters", added, threshold=ADD_MILLISECONDS))
    return rows


def _figure(name: str, samples: Sequence[float], more: str = "", threshold: float | None = None) -> Figure:
    first, third = bench_stats.quartiles(samples)
    detail = f"middle half {first:.2f} to {third:.2f}" + (f"; {more}" if more else "")
    return Figure("read", name, "ms", bench_stats.interval(samples), detail, threshold)


def _readings(case: Case, setup: Setup) -> dict[str, list[float]]:
    """In a child inside the namespace: install, then read in turns with each reader."""
    datapath = IptablesDatapath()
    datapath.install(setup.plan())
    _require(case, datapath.read())
    with IPSet() as ipset:
        names = _set_names()
        return {
            OURS: _times(datapath.read, case.readings),
            IPSET_SAVE: _times(_ipset_save, max(case.readings // 4, 9)),
            PYROUTE2: _times(lambda: _pyroute2(ipset, names), LEAST_SAMPLES),
        }


def _nft_readings(case: Case, setup: Setup) -> dict[str, list[float]]:
    """In a child inside the namespace: read all counters; and give an address that joins its counters in all sets."""
    datapath = NftablesDatapath()
    datapath.install(setup.plan())
    _require(case, datapath.read())
    wide = Setup(setup.policy, ["10.244.0.0/16"], setup.own, datapath="nftables")
    readings = _times(datapath.read, case.readings)
    datapath.install(wide.plan())
    datapath.add(pack(f"10.244.{n // 250}.{n % 250}") for n in range(case.counters // 10))
    new = (pack(f"10.244.200.{n}") for n in range(case.readings + 1))
    return {NFTABLES: readings, ADD: _times(lambda: datapath.add([next(new)]), case.readings)}


def _require(case: Case, snapshot: Snapshot) -> None:
    counters = sum(len(reading.counts) for reading in snapshot.readings if reading.key.scope is Scope.POD)
    if counters != case.counters:
        raise RuntimeError(f"{counters} counters are installed, not {case.counters}")


def _times(read: Callable[[], object], readings: int) -> list[float]:
    read()
    milliseconds = []
    for _ in range(readings):
        start = time.perf_counter()
        read()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return milliseconds


def _ipset_save() -> dict[tuple[str, str], tuple[int, int]]:
    text = subprocess.run(["ipset", "save"], capture_output=True, text=True, check=True).stdout
    return {(name, ip): (int(packets), int(octets)) for name, ip, packets, octets in ELEMENT.findall(text)}


def _set_names() -> list[str]:
    text = subprocess.run(["ipset", "list", "-n"], capture_output=True, text=True, check=True).stdout
    return [name for name in text.split() if name.startswith(SET_PREFIX)]


def _pyroute2(ipset: IPSet, names: Sequence[str]) -> dict[tuple[str, str], tuple[int, int]]:
    counters = {}
    for name in names:
        for message in ipset.list(name):
            for entry in message.get_attr("IPSET_ATTR_ADT").get_attrs("IPSET_ATTR_DATA"):
                address = entry.get_attr("IPSET_ATTR_IP_FROM")
                ip = address.get_attr("IPSET_ATTR_IPADDR_IPV4") or address.get_attr("IPSET_ATTR_IPADDR_IPV6")
                counters[name, ip] = (entry.get_attr("IPSET_ATTR_PACKETS"), entry.get_attr("IPSET_ATTR_BYTES"))
    return counters
