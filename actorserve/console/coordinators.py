"""One console's connections to a cluster's coordinators, of which one serves and the others stand by."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from actorserve.console.session import Asker
from actorserve.core.messages import Answer, Command, Outcome

_ASK_AGAIN_S: Final = 0.1


class Coordinators:
    """Asks the coordinator that serves, and looks for it among ``askers``, first those that come first.

    A command is sent only to a coordinator that has just said that it serves, because an act that was sent and not
    answered may be done, and another coordinator would do it again.
    """

    def __init__(self, askers: Iterable[Asker]) -> None:
        self._askers = deque(askers)

    @property
    def address(self) -> str:
        return self._askers[0].address

    def ask(self, command: Command, timeout_s: float) -> Answer | None:
        """The answer of the coordinator that serves. Otherwise a standby's, which names it; None if none answers."""
        until_s = time.monotonic() + timeout_s
        found = self._find(Command(f"{command.command_id}?", "status"), until_s)
        if found is None or found.outcome is Outcome.STANDBY:
            return found
        return self._askers[0].ask(command, max(0.0, until_s - time.monotonic()))

    def _find(self, question: Command, until_s: float) -> Answer | None:
        """Ask one after the other, until one serves or the time is over. It is the first one then."""
        last = None
        while (left_s := until_s - time.monotonic()) > 0.0:
            for _ in range(len(self._askers)):
                answer = self._askers[0].ask(question, left_s / (2 * len(self._askers)))
                if answer is not None and answer.outcome is not Outcome.STANDBY:
                    return answer
                last = answer or last
                self._askers.rotate(-1)
            time.sleep(_ASK_AGAIN_S)
        return last
