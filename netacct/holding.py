"""Keeping the agent's place in the state directory, also where somebody clears that while it runs.

Without its files no command would reach the agent, and a second one could start beside it.
"""

from __future__ import annotations

from netacct import clock
from netacct.control import ControlServer, WriterLock
from netacct.errors import NetacctError
from netacct.log import get

LOOK_SECONDS = 5.0
"""How often to look after lock and socket: two calls of stat(2)."""


class Holding:
    """Lock and socket of a running agent. For one thread; `troubles` may be read from any.

    Attributes:
        due: when to look again (seconds since boot).
        troubles: why the agent does not have its place, in words; empty where it does.
    """

    def __init__(self, lock: WriterLock, server: ControlServer) -> None:
        self._lock, self._server = lock, server
        self._log = get(part="state")
        self.due = clock.now() + LOOK_SECONDS
        self.troubles: list[str] = []

    def look(self) -> None:
        """Make anew what is gone. Where that cannot be, it is logged once and tried again."""
        self.due = clock.now() + LOOK_SECONDS
        try:
            lock, socket = self._lock.renew(), self._server.renew()
        except NetacctError as error:
            if not self.troubles:
                self._log.error("somebody removed the agent's lock or socket, trying again", error=str(error))
            self.troubles = [str(error)]
            return
        self.troubles = []
        if lock or socket:
            self._log.warning("somebody removed the agent's lock or socket, made anew", lock=lock, socket=socket)
