"""Writing to nf_tables: our raw netlink beside nft(8), libnftables and pyroute2, in turn, in one network namespace."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import bench_stats
from bench_lane import GATEWAY, NODE
from bench_netns import Namespace
from bench_product import Setup
from bench_stats import Figure
from bench_variants import LOCAL_24, write_policy
from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_NEWSET, nft_set_msg
from pyroute2.nftables.main import NFTables, NFTSet

from netacct.kernel import nft_layout, nft_render
from netacct.kernel.nft_messages import TABLE
from netacct.kernel.nftables import NftablesDatapath
from netacct.kernel.plan import Plan
from netacct.model import pack

OURS, PROGRAM, LIBRARY, PYROUTE2 = "netacct", "nft -f -", "libnftables, in process", "pyroute2 NFTables"
INSTALL, ADD = "a plan installed, nftables (2,560 counters)", "a pod's counters added to all sets, nftables"
ROUNDS = {INSTALL: 15, ADD: 51}
ONLY_SETS = "counter sets and addresses only: it cannot make maps and named counters"
SONAME = "libnftables.so.1"

Samples: TypeAlias = dict[str, list[float]]
"""Milliseconds of each round, by who wrote."""


class LibNftables:
    """libnftables (libnftables(3)) in this process. OSError where it is not installed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(SONAME)
        self._library.nft_ctx_new.restype = ctypes.c_void_p
        self._library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
        self._context = ctypes.c_void_p(self._library.nft_ctx_new(0))
        self._library.nft_ctx_buffer_error(self._context)

    def run(self, text: str) -> None:
        """Do what the text says, as one transaction. Raises RuntimeError."""
        if self._library.nft_run_cmd_from_buffer(self._context, text.encode()):
            raise RuntimeError(self._library.nft_ctx_get_error_buffer(self._context).decode())

    def close(self) -> None:
        """Give everything back."""
        self._library.nft_ctx_free(self._context)


def measure(folder: Path) -> dict[str, Samples]:
    """Milliseconds by what was written and by whom. Who is not installed is left out."""
    setup = Setup(write_policy(folder / "write.yaml"), [LOCAL_24], [NODE, GATEWAY], datapath="nftables")
    with closing(Namespace()) as node:
        installs = node.call(functools.partial(_installs, setup.plan()))
    with closing(Namespace()) as node:
        additions = node.call(functools.partial(_additions, replace(setup, local=["10.244.0.0/16"]).plan()))
    return {INSTALL: installs, ADD: additions}


def figures(samples: dict[str, Samples]) -> list[Figure]:
    """The rows of the result: ours, and how many times longer others take, round by round."""
    rows = []
    for what, by_writer in samples.items():
        ours = by_writer[OURS]
        rows.append(Figure("write", what, "ms", bench_stats.interval(ours)))
        for writer, theirs in by_writer.items():
            if writer != OURS:
                times = bench_stats.interval(bench_stats.ratios(theirs, ours))
                detail = f"{times.median:.2f} times ours ({times.low:.2f} to {times.high:.2f})"
                detail += f"; {ONLY_SETS}" if writer == PYROUTE2 and what == INSTALL else ""
                rows.append(Figure("write", f"the same by {writer}", "ms", bench_stats.interval(theirs), detail))
    return rows


def _installs(plan: Plan) -> Samples:
    """In a child inside the namespace: from a plan to the kernel, and away again without the clock."""
    with closing(NFTables(nfgen_family=2)) as pyroute2:
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            OURS: (lambda: _install(plan), lambda: _program(_removal(plan))),
            PROGRAM: (lambda: _program(_text(plan)), lambda: _program(_removal(plan))),
            PYROUTE2: (lambda: _sets(pyroute2, plan), lambda: pyroute2.table("del", name=TABLE)),
        }
        with _library() as library:
            if library is not None:
                ways[LIBRARY] = (lambda: library.run(_text(plan)), lambda: library.run(_removal(plan)))
            samples: Samples = {writer: [] for writer in ways}
            for turn in range(ROUNDS[INSTALL] + 1):
                for writer, (write, remove) in ways.items():
                    _clocked(write, samples[writer] if turn else [])
                    remove()
    return samples


def _additions(plan: Plan) -> Samples:
    """In a child inside the namespace: an address joins all sets of a table that anybody may change."""
    _program(_text(plan))
    (layout, *_) = nft_layout.build(plan)
    names = [spec.name for spec in layout.sets]
    with closing(NftablesDatapath()) as ours, closing(NFTables(nfgen_family=2)) as pyroute2, _library() as library:
        ours.adopt(plan)
        if ours.verify():
            raise RuntimeError("the table is not what it should be")
        ways: dict[str, Callable[[str], object]] = {
            OURS: lambda address: ours.add([pack(address)]),
            PROGRAM: lambda address: _program(_elements(names, address)),
            PYROUTE2: lambda address: _add_elements(pyroute2, names, [address]),
        }
        if library is not None:
            ways[LIBRARY] = lambda address: library.run(_elements(names, address))
        samples: Samples = {writer: [] for writer in ways}
        for turn in range(ROUNDS[ADD] + 1):
            for number, (writer, add) in enumerate(ways.items()):
                address = f"10.244.{200 + number}.{turn}"
                _clocked(functools.partial(add, address), samples[writer] if turn else [])
        _require_all(ours, len(names), len(ways) * (ROUNDS[ADD] + 1))
    return samples


def _require_all(datapath: NftablesDatapath, sets: int, addresses: int) -> None:
    counts = [len(reading.counts) for reading in datapath.read().readings if len(reading.counts) > 1]
    if counts != [addresses] * sets:
        raise RuntimeError(f"sets have {counts} addresses, not {addresses}")


def _clocked(write: Callable[[], object], samples: list[float]) -> None:
    start = time.perf_counter()
    write()
    samples.append((time.perf_counter() - start) * 1e3)


def _install(plan: Plan) -> None:
    """By the product; afterwards the table is nobody's, so that others can take it away."""
    with closing(NftablesDatapath()) as datapath:
        datapath.install(plan)


def _text(plan: Plan) -> str:
    layouts = zip(nft_layout.build(plan), plan.families, strict=True)
    return "".join(nft_render.text(layout, family.prefilled) for layout, family in layouts)


def _removal(plan: Plan) -> str:
    return nft_render.removal_text(family.family for family in plan.families)


def _elements(names: Sequence[str], address: str) -> str:
    return "".join(f"add element ip {TABLE} {name} {{ {address} counter }}\n" for name in names)


def _program(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


def _library() -> AbstractContextManager[LibNftables | None]:
    try:
        return closing(LibNftables())
    except OSError:
        return _Missing()


class _Missing(AbstractContextManager[None]):
    """Stands for a library that is not there."""

    def __exit__(self, *_: object) -> None:
        return None


def _sets(pyroute2: Any, plan: Plan) -> None:
    """As much of a plan as pyroute2 can make: each call of its API is a transaction."""
    pyroute2.table("add", name=TABLE)
    for layout, family in zip(nft_layout.build(plan), plan.families, strict=True):
        for spec in layout.sets:
            described = NFTSet(TABLE, spec.name, key_type="ipv4_addr", counter=True).as_netlink()
            # what sets() does before it raises TypeError, in 0.9.7
            pyroute2._command(nft_set_msg, {"add": NFT_MSG_NEWSET}, "add", described)
            _add_elements(pyroute2, [spec.name], [_unpacked(ip) for ip in family.prefilled])


def _add_elements(pyroute2: Any, names: Sequence[str], addresses: Sequence[str]) -> None:
    for name in names:
        pyroute2.set_elems("add", set=NFTSet(TABLE, name, key_type="ipv4_addr"), elements=addresses)


def _unpacked(ip: bytes) -> str:
    return ".".join(map(str, ip))
