"""Log-probabilities of a prompt's tokens, as an instance collects them chunk by chunk."""

from actorserve.core.messages import PromptLogprobs


class PromptScores:
    """All entries so far, from the prompt's second token on. Their places are absolute.

    A prefill that starts again gives the same entries again, perhaps in other chunks. So what comes replaces what is
    known from its first token on, and the list is whole once the prompt is computed, however often that began.
    """

    __slots__ = ("_logprobs", "_num_best", "_ranks", "_token_ids")

    def __init__(self, num_best: int) -> None:
        """``num_best``: how many of the best tokens the client asked for; a small vocabulary has fewer."""
        self._num_best = num_best
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._ranks: list[int] = []

    @property
    def num_tokens(self) -> int:
        """How many of the prompt's tokens have entries."""
        return len(self._token_ids) // (1 + self._num_best)

    def put(self, position: int, found: PromptLogprobs) -> None:
        """Take the entries of the tokens from the absolute ``position`` on, which is 1 for the prompt's second token.

        Raises: ValueError if the entries before them are missing, or the columns differ in length: a bug of the engine.
        """
        self._num_best = found.num_best
        first = (position - 1) * (1 + found.num_best)
        num_entries = len(found.token_ids)
        if first > len(self._token_ids) or not num_entries == len(found.logprobs) == len(found.ranks):
            raise ValueError(f"log-probabilities of a prompt from position {position} do not follow those before")
        self._token_ids[first:] = found.token_ids
        self._logprobs[first:] = found.logprobs
        self._ranks[first:] = found.ranks

    def whole(self) -> PromptLogprobs:
        """All entries."""
        return PromptLogprobs(self._num_best, tuple(self._token_ids), tuple(self._logprobs), tuple(self._ranks))
