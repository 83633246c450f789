"""What the agent tells of rules that stand before its own: to the log, to `rules diff` and on /metrics.

When to move before them and when to stay behind is decided in `kernel/position.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from netacct.kernel.base import Datapath
from netacct.kernel.position import Rival
from netacct.log import get


class Rivals:
    """Remembers what was said already. For one thread."""

    def __init__(self) -> None:
        self._yielded: set[Rival] = set()
        self._log = get()

    def verify(self, datapath: Datapath) -> list[str]:
        """The differences to mend, in words. Logs to whom ours give way, and when no longer. Raises DatapathError."""
        found = datapath.verify()
        yielded = {rival for rival in datapath.position.shadows() if datapath.position.has_yielded(rival)}
        for rival in yielded - self._yielded:
            self._log.warning(
                "yielding to rules that come before ours again and again; what they end is not counted",
                hook=rival.hook,
                family=rival.family,
                rule=f"{rival.number} {rival.jump}",
            )
        if self._yielded and not yielded:
            self._log.info("not yielding any more")
        self._yielded = yielded
        return found


def all_differences(datapath: Datapath) -> list[str]:
    """Differences to mend and those that ours stay behind for now, in words. Raises DatapathError."""
    return datapath.verify() + [str(rival) for rival in datapath.position.shadows()]


def outcome(datapath: Datapath, found: list[str]) -> list[str]:
    """What came of repairing `found`, in words: what others do to our rules may still be so. Raises DatapathError."""
    left = all_differences(datapath) if found else []
    repaired = [f"repaired: {words}" for words in found if words not in left]
    return repaired + [f"still there: {words}" for words in left]


def blind_spots(datapath: Datapath) -> Mapping[str, bool]:
    """`netacct_blind_spot`, as of the last verification: reason -> whether it holds."""
    return {"shadowed": bool(datapath.position.shadows())}
