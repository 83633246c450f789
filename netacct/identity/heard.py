"""What other sources say, for a source that hears of it and adds something of its own."""

from __future__ import annotations

import threading

from netacct.identity.claims import uid_of
from netacct.identity.source import Replace, SourceEvent
from netacct.model import Address, Observation


class Heard:
    """All that other sources vouch for now. May be used from any thread; no method blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, Address, str, str], Observation] = {}

    def note(self, event: SourceEvent) -> None:
        """Take in what a source says."""
        with self._lock:
            if isinstance(event, Replace):
                self._known = {key: seen for key, seen in self._known.items() if key[0] != event.source}
            for seen in event.observations:
                key = (seen.source, seen.ip, uid_of(seen.pod), seen.sandbox)
                if seen.present:
                    self._known[key] = seen
                else:
                    self._known.pop(key, None)

    def observations(self) -> list[Observation]:
        """What is vouched for."""
        with self._lock:
            return list(self._known.values())
