"""Ten thousand prefixes from the clouds' own lists: read and planned, and the plan installed by each datapath."""

from __future__ import annotations

import functools
import ipaddress
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import bench_stats
from bench_flows import random_cidrs
from bench_lane import GATEWAY, NODE
from bench_netns import Namespace
from bench_product import DATAPATHS, Setup
from bench_stats import Figure
from bench_variants import LOCAL_24

PREFIXES, IPV6_SHARE = 10_000, 5
"""How many, of which a fifth are IPv6."""
ROUNDS = 9
SECONDS = 2.0
LOAD = f"{PREFIXES:,} prefixes of AWS, Google and Azure: lists read, and a plan made"
INSTALL = "the plan of it installed, {}"

POLICY = """classes:
  pod: {{cidrs: [10.244.0.0/16]}}
  node: {{cidrs: [192.168.50.0/24]}}
  service: {{cidrs: [10.96.0.0/12]}}
  private: {{builtin: private}}
  storage:
    list:
      - {{format: aws, file: {aws}, services: [S3]}}
      - {{format: google, file: {google}, services: [Google Cloud]}}
      - {{format: azure, file: {azure}, services: [AzureStorage]}}
default: internet
"""

_Cidr: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def measure(folder: Path) -> dict[str, list[float]]:
    """Seconds of each round, by what was done."""
    setup = Setup(_write(folder, random.Random(PREFIXES)), [LOCAL_24], [NODE, GATEWAY])
    samples = {LOAD: _seconds(setup.plan)}
    for name in DATAPATHS:
        with closing(Namespace()) as node:
            samples[INSTALL.format(name)] = node.call(functools.partial(_installs, name, setup))
    return samples


def figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    return [
        Figure("lists", what, "s", bench_stats.interval(seconds), threshold=SECONDS)
        for what, seconds in samples.items()
    ]


def _installs(name: str, setup: Setup) -> list[float]:
    """In a child inside the namespace: over nothing each time."""
    plan, datapath = setup.plan(), DATAPATHS[name]()
    with closing(datapath):
        return _seconds(lambda: datapath.install(plan), datapath.remove)


def _seconds(act: Callable[[], object], undo: Callable[[], object] = lambda: None) -> list[float]:
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
        undo()
    return found


def _write(folder: Path, dice: random.Random) -> Path:
    """Write a policy and its lists, each prefix in one of them; returns the policy's path."""
    cidrs: list[_Cidr] = [*random_cidrs(dice, PREFIXES - PREFIXES // IPV6_SHARE), *_ipv6(dice, PREFIXES // IPV6_SHARE)]
    dice.shuffle(cidrs)
    aws, google, azure = (cidrs[i::3] for i in range(3))
    files = {"aws": _aws(aws), "google": _google(google), "azure": _azure(azure)}
    paths = {name: folder / f"{name}.json" for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content, indent=2))
    policy = folder / "lists.yaml"
    policy.write_text(POLICY.format(**paths))
    return policy


def _ipv6(dice: random.Random, count: int) -> list[ipaddress.IPv6Network]:
    """So many different public CIDRs of /32 to /56."""

    def one() -> ipaddress.IPv6Network:
        return ipaddress.IPv6Network((1 << 125 | dice.getrandbits(124), dice.randint(32, 56)), strict=False)

    return list(islice(dict.fromkeys(one() for _ in range(2 * count)), count))


def _aws(cidrs: Sequence[_Cidr]) -> dict[str, Any]:
    """As ip-ranges.json: each prefix under its service and under AMAZON."""
    rows: dict[int, list[dict[str, str]]] = {4: [], 6: []}
    for cidr in cidrs:
        key = "ip_prefix" if cidr.version == 4 else "ipv6_prefix"
        row = {key: str(cidr), "region": "eu-west-1", "network_border_group": "eu-west-1"}
        rows[cidr.version] += [row | {"service": service} for service in ("AMAZON", "S3")]
    head = {"syncToken": "1700000000", "createDate": "2023-11-14-22-13-20"}
    return {**head, "prefixes": rows[4], "ipv6_prefixes": rows[6]}


def _google(cidrs: Sequence[_Cidr]) -> dict[str, Any]:
    """As cloud.json."""
    rows = [
        {f"ipv{cidr.version}Prefix": str(cidr), "service": "Google Cloud", "scope": "europe-west4"} for cidr in cidrs
    ]
    return {"syncToken": "1700000000000", "creationTime": "2023-11-14T22:13:20.000000", "prefixes": rows}


def _azure(cidrs: Sequence[_Cidr]) -> dict[str, Any]:
    """As ServiceTags_Public.json."""
    properties = {
        "changeNumber": 1, "region": "", "regionId": 0, "platform": "Azure", "systemService": "AzureStorage",
        "addressPrefixes": [str(cidr) for cidr in cidrs], "networkFeatures": ["API"],
    }  # fmt: skip
    return {
        "changeNumber": 1,
        "cloud": "Public",
        "values": [{"name": "Storage", "id": "Storage", "properties": properties}],
    }
