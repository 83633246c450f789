"""Follows what a node's own files, processes, rules and routes say about the ranges of the whole cluster.

Files are followed with inotify; all is looked at anew once a minute, because nobody tells of processes, rules and
routes at a price that does not grow with pods and Services (a route changes with each pod, a rule with each endpoint).
What was found holds until something else is found.

The ClusterIPs in use are not collected, although each is surely `service`: they would change the rules of every node
with every Service, for the sake of the host's own packets alone (a pod's are counted after the translation).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from netacct import log
from netacct.errors import NetacctError
from netacct.following import Entry, Follower, Pace, contents, entries
from netacct.identity.cluster import Kept, Reading, fault, keep
from netacct.identity.cluster_files import Files
from netacct.identity.cluster_routes import Routes
from netacct.identity.cni_cache import CONFIGURATION
from netacct.policy import CLUSTER, NODE, POD, Prefix

PACE = Pace(poll=60.0, quiet=0.2, limit=2.0)

LEGACY = 600.0
"""Seconds between looks into a legacy nat table, which is copied whole; and only while nothing else names pods."""

ReadRules = Callable[[], Iterable[Prefix]]
"""Reads kube-proxy's rules. Raises NetacctError."""


class ClusterRanges:
    """Finds the cluster's ranges, and tells them whenever they differ.

    Args:
        providers: those of `cluster.PROVIDERS` that are asked for.
        rules: reads kube-proxy's rules in nftables, and in legacy tables.
        directories: where the container runtime reads its CNI configuration.
        root: a directory that stands for /, for tests.
        proc: where proc(5) is mounted.
    """

    def __init__(
        self,
        providers: Iterable[str],
        rules: tuple[ReadRules, ReadRules],
        directories: Sequence[str] = CONFIGURATION,
        root: str = "",
        proc: str = "/proc",
    ) -> None:
        self._providers, self._rules, self._proc = tuple(providers), rules, proc
        self._directories = tuple(root + directory for directory in directories)
        self._files = Files(self._providers, directories, root, proc)
        self._routes = Routes()
        self._cloud: tuple[Prefix, ...] = ()
        self._legacy_at = 0.0
        self._kept = Kept({})
        self._faults: frozenset[str] = frozenset()
        self._told: tuple[Prefix, ...] = ()
        self._tell: Callable[[tuple[Prefix, ...]], None] | None = None
        self._log = log.get(source="cluster-ranges")
        self._follower = Follower(self._wanted, self._look, PACE, "cluster-ranges", self._log)

    def start(self, changed: Callable[[tuple[Prefix, ...]], None]) -> tuple[Prefix, ...]:
        """Return what is found now, and call `changed` with all of it whenever it differs, from a thread."""
        self._look(None)
        self._tell = changed
        self._follower.start()
        return self._told

    def stop(self) -> None:
        """End the thread; `changed` is not called any more once this returned. Idempotent."""
        self._follower.stop()

    def learn(self, facts: Iterable[Prefix]) -> None:
        """Take what a cloud's metadata says of the networks around this node. From any thread; never blocks."""
        if "cloud" in self._providers:
            self._cloud = tuple(facts)
            self._follower.wake()

    def read(self) -> tuple[tuple[Prefix, ...], tuple[str, ...]]:
        """What is found now, without following it; and what was there and cannot be a range, in words. Logs nothing."""
        readings = self._readings()
        return keep(Kept({}), readings).all, tuple(why for reading in readings for why in reading.faults)

    def _wanted(self) -> Iterator[Entry]:
        for path in sorted(self._files.paths):
            if not path.startswith(self._proc + "/"):
                yield from entries(os.path.abspath(path))  # noqa: PTH100 -- a Path would follow links
        yield from contents(self._directories)

    def _look(self, _paths: frozenset[str] | None) -> None:
        readings = self._readings()
        before, self._kept = self._kept, keep(self._kept, readings)
        faults = frozenset(why for reading in readings for why in reading.faults)
        for why in sorted(faults - self._faults):
            self._log.warning("not taken for a cluster range", why=why)
        for kind in sorted(self._kept.stale - before.stale):
            self._log.info("cluster ranges are not told any more, what was told holds", kind=kind)
        self._faults = faults
        if self._kept.all != self._told:
            self._told = self._kept.all
            if self._tell is not None:
                self._tell(self._told)
            self._log.info("cluster ranges", found=", ".join(f"{one.network} {one.traffic}" for one in self._told))

    def _readings(self) -> list[Reading]:
        """What all that is due to be asked says now."""
        readings = self._files.look()
        if "routes" in self._providers:
            readings += self._attempt("routes", self._routes.look)
        readings.append(_checked(Reading("cloud", tuple(self._placed(fact) for fact in self._cloud))))
        if "rules" in self._providers:
            readings += self._attempt("rules", lambda: [_checked(Reading("rules", tuple(self._rules[0]())))])
            known = any(fact.traffic == POD for reading in readings for fact in reading.facts)
            if not known and time.monotonic() >= self._legacy_at:
                self._legacy_at = time.monotonic() + LEGACY
                legacy = "legacy rules"
                readings += self._attempt(legacy, lambda: [_checked(Reading(legacy, tuple(self._rules[1]())))])
        return readings

    def _placed(self, fact: Prefix) -> Prefix:
        """A cloud's subnet is one of nodes if this node reaches others by it; another one holds who knows whom."""
        here = any(way.ip in fact.network for way in self._routes.ways_out)
        return fact if fact.traffic != NODE or here else fact._replace(traffic=CLUSTER)

    def _attempt(self, kind: str, look: Callable[[], list[Reading]]) -> list[Reading]:
        try:
            return look()
        except (OSError, NetacctError) as error:
            return [Reading(kind, faults=(f"{kind} cannot be read: {error}",))]


def _checked(reading: Reading) -> Reading:
    """A reading without what cannot be a range of a cluster."""
    reasons = {fact: fault(fact.network) for fact in reading.facts}
    facts = tuple(fact for fact, why in reasons.items() if not why)
    faults = tuple(f"{why} ({fact.origin})" for fact, why in reasons.items() if why)
    return Reading(reading.kind, facts, reading.faults + faults)
