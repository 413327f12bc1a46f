"""The newest token of each request, for steps that are planned before it is known."""

from collections.abc import Sequence
from dataclasses import replace

from actorserve.core.messages import NOT_YET, StepPlan


class LastTokens:
    """What the newest step has sampled."""

    def __init__(self) -> None:
        self._token_of: dict[str, int] = {}

    def set(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """A step has sampled these tokens."""
        self._token_of = dict(zip(request_ids, token_ids, strict=True))

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with tokens in place of ``NOT_YET``.

        A request that got no token, because its grammar failed, is fed token 0 and gets none again.
        """
        if not any(tokens[-1] == NOT_YET for tokens in plan.token_ids if tokens):
            return plan
        token_ids, samples = list(plan.token_ids), list(plan.samples)
        for row, (request_id, tokens) in enumerate(zip(plan.request_ids, plan.token_ids, strict=True)):
            if tokens and tokens[-1] == NOT_YET:
                token_id = self._token_of.get(request_id)
                token_ids[row] = (*tokens[:-1], token_id or 0)
                samples[row] = samples[row] and token_id is not None
        return replace(plan, token_ids=tuple(token_ids), samples=tuple(samples))
