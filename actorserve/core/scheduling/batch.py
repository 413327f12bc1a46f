"""One iteration: the requests that take part in it, and how many tokens of each."""

from dataclasses import dataclass

from actorserve.core.messages import NOT_YET, StepPlan
from actorserve.core.request import Request
from actorserve.core.scheduling.token_budget import IterationBudget

_ONLY_NOT_YET = (NOT_YET,)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows (request, tokens fed) of one iteration, and the budget that it was planned with.

    Without rows there may be no budget either.
    """

    rows: list[tuple[Request, int]]
    budget: IterationBudget | None

    @property
    def num_decodes(self) -> int:
        return self.budget.iteration.num_decodes if self.budget is not None else 0

    @property
    def num_prompts(self) -> int:
        """The requests of which it computes a part of the prompt, or the whole prompt."""
        return len(self.rows) - self.num_decodes

    def step_plan(self, step_id: int) -> StepPlan:
        """The iteration as the engine gets it."""
        rows = self.rows
        starts = [request.num_fed for request, _ in rows]
        scores = tuple([request.wants_prompt_scores for request, _ in rows])
        return StepPlan(
            step_id=step_id,
            request_ids=tuple([request.request_id for request, _ in rows]),
            starts=tuple(starts),
            token_ids=tuple([_fed_tokens(*row, start) for row, start in zip(rows, starts, strict=True)]),
            block_tables=tuple([tuple(request.blocks) for request, _ in rows]),
            samples=tuple([num_fed == request.num_uncomputed for request, num_fed in rows]),
            scores=scores if True in scores else (),
        )


def _fed_tokens(request: Request, num_fed: int, start: int) -> tuple[int, ...]:
    """The next ``num_fed`` tokens to feed, from ``start`` on. The last one may be made by the iteration in flight."""
    token_ids = request.token_ids
    if num_fed == 1:
        return (token_ids[start],) if start < len(token_ids) else _ONLY_NOT_YET
    tokens = tuple(token_ids[start : start + num_fed])
    return tokens if len(tokens) == num_fed else (*tokens, NOT_YET)
