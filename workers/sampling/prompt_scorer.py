"""Log-probabilities of prompts' tokens, from the hidden states of the tokens before them."""

from collections.abc import Callable

from torch import Tensor

from actorserve.core.messages import PromptLogprobs, RequestSpec, StepPlan
from workers.sampling.logprobs import score_tokens

_ROWS_PER_SLICE = 32
"""Logits of so many tokens lie in memory at once: a chunk of 4,096 tokens with 128k logits each would take 2 GB."""


class PromptScorer:
    """Scores the prompts of the requests that were added and want it."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestSpec] = {}

    def add(self, request: RequestSpec) -> None:
        """Add a request; it replaces a request with the same id."""
        if request.sampling.prompt_logprobs >= 0:
            self._requests[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def __call__(
        self, plan: StepPlan, hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[PromptLogprobs | None, ...]:
        """One entry for each row of the plan; empty if the plan wants no scores.

        ``hidden``: [T, hidden_size], of the plan's tokens. ``head`` makes logits [n, vocab_size] float32 of n of them.

        Raises: KeyError if a request whose scores are wanted was not added.
        """
        if not plan.scores:
            return ()
        entries: list[PromptLogprobs | None] = []
        end = 0
        for request_id, start, token_ids, scores in zip(
            plan.request_ids, plan.starts, plan.token_ids, plan.scores, strict=True
        ):
            first, end = end, end + len(token_ids)
            if not scores:
                entries.append(None)
                continue
            request = self._requests[request_id]
            following = request.prompt_token_ids[start + 1 : start + 1 + len(token_ids)]
            parts = [
                score_tokens(
                    head(hidden[first + at : first + min(at + _ROWS_PER_SLICE, len(following))]),
                    following[at : at + _ROWS_PER_SLICE],
                    request.sampling.prompt_logprobs,
                )
                for at in range(0, len(following), _ROWS_PER_SLICE)
            ]
            entries.append(_joined(parts) if parts else None)
        return tuple(entries)


def _joined(parts: list[PromptLogprobs]) -> PromptLogprobs:
    return PromptLogprobs(
        parts[0].num_best,
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(logprob for part in parts for logprob in part.logprobs),
        tuple(rank for part in parts for rank in part.ranks),
    )
