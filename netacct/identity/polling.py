"""A source that asks somebody, again and again, for all pods of this node."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from netacct import clock, log
from netacct.errors import NetacctError
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.log import Repeats
from netacct.model import Observation
from netacct.sleeper import Sleeper, Why

INTERVAL = 30.0
"""Seconds between two questions, on average; each pause differs from it by up to a half, so that nodes spread out."""

HURRY_SECONDS = 10.0
"""No two questions are closer than this, however urgent somebody wants to know."""

TROUBLE_SECONDS = 300.0
"""The same trouble is logged again after so long."""


class AbsentError(NetacctError):
    """What a source asks is not on this node: no trouble, unless somebody asked for this source by name."""


class Poller:
    """Asks at once in a thread of its own, then every so often, and emits a `Replace` whenever the answer differs.

    Trouble takes nothing back: what was told last holds until there is another answer.

    Args:
        name: of the source.
        ask: returns the observations of now (it gets the time, CLOCK_BOOTTIME seconds); raises NetacctError where it
            cannot tell, AbsentError where there is nobody to be asked.
        needed: False while a better source is up; then nobody is asked, and what was told is taken back.
        interval: seconds between two questions.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[float], Iterable[Observation]],
        needed: Callable[[], bool] = lambda: True,
        interval: float = INTERVAL,
    ) -> None:
        self.name = name
        self._ask, self._needed, self._interval = ask, needed, interval
        self._emit: Callable[[SourceEvent], None] = lambda _: None
        self._told: tuple[Observation, ...] | None = None
        self._health = Health(up=False, reason="not asked yet", present=False)
        self._answered: float | None = None
        self._asked = -HURRY_SECONDS
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._log = log.get(source=name)
        self._sleeper = Sleeper(f"source-{name}")

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin to ask. `emit` is called from the thread, never from this call: whoever is asked may be slow."""
        self._emit = emit
        self._sleeper.start(self._run)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._sleeper.stop()

    def hurry(self) -> None:
        """Somebody's bytes have no owner: ask soon. From any thread."""
        self._sleeper.wake()

    def healthy(self) -> Health:
        """Whether the last question was answered, and how long ago the last answer came."""
        age = None if self._answered is None else clock.now() - self._answered
        return self._health._replace(age=age)

    def _run(self) -> None:
        pause = 0.0
        while (why := self._sleeper.sleep(pause)) is not Why.STOP:
            wait = self._asked + HURRY_SECONDS - clock.now()
            if why is Why.WOKEN and wait > 0:
                pause = wait
                continue
            self._turn()
            pause = self._interval * random.uniform(0.5, 1.5)  # noqa: S311 -- spreads nodes, guards nothing

    def _turn(self) -> None:
        self._asked = clock.now()
        if not self._needed():
            self._tell(())
            self._health = Health(up=False, reason="not asked: a better source is up", present=False)
            return
        try:
            told = tuple(self._ask(self._asked))
        except AbsentError as error:
            self._health = Health(up=False, reason=str(error), present=False)
        except Exception as error:  # noqa: BLE001 -- a source that died would go unnoticed
            known = isinstance(error, NetacctError | OSError)
            self._health = Health(up=False, reason=str(error) if known else f"{type(error).__name__}: {error}")
            if self._repeats.due(self._health.reason):
                self._log.warning("cannot learn pods from this source, trying again", error=self._health.reason)
        else:
            self._answered = self._asked
            self._health = Health(up=True)
            self._tell(told)

    def _tell(self, now: tuple[Observation, ...]) -> None:
        """Emit what is known now, where it differs in more than the time from what was told."""
        before = None if self._told is None else {timeless(seen) for seen in self._told}
        if before is None and not now and not self._health.up:
            return  # never asked: nothing to take back
        if before != {timeless(seen) for seen in now}:
            self._told = now
            self._emit(Replace(self.name, now, self._asked))


def timeless(seen: Observation) -> Observation:
    """Without the time, and with `created` to ten seconds: wall clocks are slewed, and that is no news."""
    return replace(seen, seen_at=0.0, created=round(seen.created, -1) if seen.created > float("-inf") else seen.created)
