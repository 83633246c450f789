"""Steps that may fail in an agent that must go on."""

from __future__ import annotations

from collections.abc import Callable

from netacct.errors import NetacctError
from netacct.log import Repeats, get

TROUBLE_SECONDS = 300.0
"""The same trouble is logged again after so long."""


class Attempts:
    """Tries steps, and logs what fails, sparingly. For one thread.

    Args:
        seconds: the same trouble is logged again after so long.
    """

    def __init__(self, seconds: float = TROUBLE_SECONDS) -> None:
        self._repeats = Repeats(seconds)
        self._log = get()

    def __call__(self, what: str, step: Callable[[], object]) -> bool:
        """Whether the step succeeded, or raised a NetacctError or OSError; `what` names it in the log."""
        try:
            step()
        except (NetacctError, OSError) as error:
            if self.is_news(what):
                self._log.error(f"{what} failed, trying again", error=str(error))
            return False
        self._repeats.forget(what)
        return True

    def is_news(self, what: str) -> bool:
        """Whether to log trouble of this name now."""
        return self._repeats.due(what)
