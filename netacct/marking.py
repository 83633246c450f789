"""Whether packets are marked, decided anew from time to time: programs that use the same bits come and go."""

from __future__ import annotations

from typing import cast

from netacct import clock
from netacct.attempts import Attempts
from netacct.config import Config
from netacct.errors import DatapathError
from netacct.kernel import marks
from netacct.kernel.marks import MarkDecision
from netacct.log import get
from netacct.policy import MarkTable, Policy

AGAIN_SECONDS = 300.0
"""How often the node is searched for others who use our bits."""


def decide(config: Config, policy: Policy) -> MarkDecision:
    """Look at the node and decide. Raises DatapathError where `on` is asked for and cannot be."""
    mode = cast("marks.Mode", config.marks.mode)  # the configuration accepts nothing else
    return marks.resolve(mode, policy.marks.mask if policy.marks else None)


def of_agent(config: Config, policy: Policy) -> MarkDecision:
    """As `decide`; but where rules are only taken away, nothing is asked for that could stand in the way of that."""
    return decide(config, policy) if config.enabled else MarkDecision(False, "enabled is false in the configuration")


class Marking:
    """The decision in force.

    Attributes:
        enabled, reason: whether packets are marked; why not, or "".
        due: when to decide again (seconds since boot).
    """

    def __init__(self) -> None:
        self.enabled, self.reason = False, "not decided yet"
        self.due = 0.0
        self._log = get()

    def decide(self, config: Config, policy: Policy) -> None:
        """Look at the node, and put in force what follows. Raises DatapathError as the function does."""
        self.take(of_agent(config, policy))

    def decide_again(self, config: Config, policy: Policy, attempt: Attempts) -> None:
        """As `decide`, for who comes back to it in any case; a failure is logged and leaves what is in force.

        So does a node that cannot be looked at for once (others write all the time): marks shall not flap with it.
        """

        def again() -> None:
            decision = of_agent(config, policy)
            if self.enabled and not decision.looked:
                raise DatapathError(decision.reason)
            self.take(decision)

        self.postpone()
        attempt("looking for other users of marks", again)

    def take(self, decision: MarkDecision) -> None:
        """Put a decision in force, and log it where it is another one."""
        self.postpone()
        if (decision.enabled, decision.reason) != (self.enabled, self.reason):
            self.enabled, self.reason = decision.enabled, decision.reason
            self._log.info("marks", enabled=self.enabled, reason=self.reason or "nobody else has the bits")

    def postpone(self) -> None:
        """Look again in a while."""
        self.due = clock.now() + AGAIN_SECONDS

    def table(self, policy: Policy) -> MarkTable | None:
        """The marks to set."""
        return policy.marks if self.enabled else None
