"""Where our rules stand among rules of others in a hook of legacy xtables, and when to give way. Pure.

A rule before ours that can end a packet's way through the hook hides traffic from us, so ours are moved up. Another
program may want to be first as well, and move its rules up in turn: then the two would rewrite the table for ever, each
time under the lock that everybody needs. So moves become rarer, and after a few against the same rival ours stay behind
it. Packets that it lets pass are counted there too; who looks at the numbers has to know that the others are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from netacct.model import Family

MOVES = 3
"""So often our rules are moved before the same rival within WINDOW_SECONDS."""

WINDOW_SECONDS = 600.0
"""Moves older than this are forgotten."""

BACKOFF_SECONDS = 10.0
"""The least time between a first move and a second; twice that between the second and the third, and so on."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Rules of somebody else in a hook that stand before ours and can end traversal.

    All that lead to the same target are one rival, whatever they match: a firewall has a rule for each of its services.

    Args:
        family, hook: where.
        jump: how iptables would write where they lead, as `-j ACCEPT`.
        number: of the first of them in the hook, from 1; does not tell rivals apart.
        hooked: whether rules of ours are in the hook; does not tell rivals apart.
    """

    family: Family
    hook: str
    jump: str
    number: int = field(compare=False)
    hooked: bool = field(compare=False, default=True)

    def __str__(self) -> str:
        where = f"IPv{self.family}: hook {self.hook}: our rules are behind rule {self.number}"
        return f"{where} ({self.jump}), which can end traversal"


Held = dict[str, set[str]]
"""Hook -> the jumps of the rivals before which our rules are not to go now. Of one family."""


class Position:
    """Remembers moves, and decides on the next one. Times are seconds of any steady clock.

    Args:
        backoff: see BACKOFF_SECONDS.
        window: see WINDOW_SECONDS.
    """

    def __init__(self, backoff: float = BACKOFF_SECONDS, window: float = WINDOW_SECONDS) -> None:
        self._backoff, self._window = backoff, window
        self._moves: dict[Rival, list[float]] = {}
        self._ahead: dict[Family, tuple[Rival, ...]] = {}
        self._yielded: set[Rival] = set()
        self._held: dict[Family, Held] = {}

    def look(self, family: Family, rivals: Iterable[Rival], at: float) -> Held:
        """Take in which rivals are ahead of us in a family's hooks, and decide in which hooks our rules stay in place.

        A rival that we had yielded to and that is not ahead any more has given way by itself, and is forgiven.
        """
        ahead = tuple(rivals)
        self._ahead[family] = ahead
        for rival in [one for one in self._yielded if one.family == family and one not in ahead]:
            self._moves.pop(rival, None)
        self._moves = {rival: kept for rival, times in self._moves.items() if (kept := self._recent(times, at))}
        self._yielded = {one for one in self._yielded.union(ahead) if len(self._moves.get(one, ())) >= MOVES}
        held: Held = {}
        for rival, times in self._moves.items():
            if rival.family == family and not self._may_move(times, at):
                held.setdefault(rival.hook, set()).add(rival.jump)
        self._held[family] = held
        return held

    def moved(self, family: Family, at: float) -> None:
        """Our rules were moved, after the last look, in all of the family's hooks where they were behind a rival."""
        for rival in self._ahead.get(family, ()):
            if rival.hooked and rival.hook not in self._held[family]:
                self._moves.setdefault(rival, []).append(at)

    def shadows(self) -> list[Rival]:
        """The rivals that our rules stay behind, for a while or until further notice, as of the last look."""
        return [
            rival
            for family, rivals in self._ahead.items()
            for rival in rivals
            if rival.hooked and rival.hook in self._held[family]
        ]

    def has_yielded(self, rival: Rival) -> bool:
        """Whether our rules were moved before a rival as often as is good, and it came again, as of the last look."""
        return rival in self._yielded

    def forget(self) -> None:
        """Begin anew: somebody wants our rules to move, or they are gone."""
        self._moves, self._yielded, self._ahead, self._held = {}, set(), {}, {}

    def _recent(self, times: list[float], at: float) -> list[float]:
        return [time for time in times if at - time < self._window]

    def _may_move(self, times: list[float], at: float) -> bool:
        return len(times) < MOVES and at - times[-1] >= self._backoff * 2 ** (len(times) - 1)
