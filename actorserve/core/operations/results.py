"""The answers to the last acts, so that an act is not done twice if its command is repeated."""

from collections import OrderedDict
from typing import Final

from actorserve.core.messages import Answer

MAX_RESULTS: Final = 1024


class Results:
    """The last ``MAX_RESULTS`` answers, by the id of their command."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, command_id: str) -> Answer | None:
        return self._answers.get(command_id)

    def add(self, answer: Answer) -> None:
        """Remember an answer without its table; acts have none."""
        self._answers[answer.command_id] = Answer(answer.command_id, answer.outcome, answer.text)
        self._answers.move_to_end(answer.command_id)
        if len(self._answers) > MAX_RESULTS:
            self._answers.popitem(last=False)
