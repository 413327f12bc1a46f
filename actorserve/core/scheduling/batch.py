"""One iteration: the requests that take part in it, and how many tokens of each."""

from dataclasses import dataclass

from actorserve.core.messages import NOT_YET, StepPlan
from actorserve.core.request import Request
from actorserve.core.scheduling.token_budget import IterationBudget


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

    def step_plan(self, step_id: int) -> StepPlan:
        """The iteration as the engine gets it."""
        rows = self.rows
        scores = tuple(request.wants_prompt_scores for request, _ in rows)
        return StepPlan(
            step_id=step_id,
            request_ids=tuple(request.request_id for request, _ in rows),
            starts=tuple(request.num_fed for request, _ in rows),
            token_ids=tuple(_fed_tokens(request, n) for request, n in rows),
            block_tables=tuple(tuple(request.blocks) for request, _ in rows),
            samples=tuple(n == request.num_uncomputed for request, n in rows),
            scores=scores if any(scores) else (),
        )


def _fed_tokens(request: Request, num_fed: int) -> tuple[int, ...]:
    """The next ``num_fed`` tokens to feed. The last one may be made by the iteration in flight."""
    start = request.num_fed
    tokens = tuple(request.token_ids[start : start + num_fed])
    return tokens if len(tokens) == num_fed else (*tokens, NOT_YET)
