"""What an iteration of a simulated engine costs: its profile's time, or the time by the rules of SplitwiseSim.

SplitwiseSim (Mutinifni/splitwise-sim) is the simulator that Splitwise was published with. Results of both simulators
compare only if both cost the same work the same, so each of its two rules can be chosen. Neither is a good model:

- A decode's time is looked up in a table by tokens of context, with the number of requests in place of the tokens. So
  64 requests take 1.01 times as long as one request, and the length of their context does not matter.
- An iteration with prompts takes as long as one prompt of all its tokens, and 1.1 times as long if decodes share it.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol

from pydantic import Field

from actorserve.core.timing.profile import Profile
from actorserve.sim.tables import Table

_MIXED: Final = 1.1  # the factor of an iteration with prompts and decodes

Rule = Literal["profile", "splitwise_sim"]


class CostsTable(Table):
    """Which rules give the time of an iteration. The scheduler always plans with the profile's."""

    decode: Rule = Field("profile", description="rule for iterations without prompts")
    prefill: Rule = Field("profile", description="rule for iterations with prompts, whether decodes share them or not")


class StepCosts(Protocol):
    """A ``Profile`` is one."""

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of an iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it."""
        ...


class SplitwiseSimCosts:
    """SplitwiseSim's rule for decodes, for prefills, or for both; otherwise the profile's."""

    def __init__(self, profile: Profile, table: CostsTable) -> None:
        self._profile = profile
        self._table = table

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        num_tokens = sum(tokens for tokens, _ in chunks)
        profile, table = self._profile, self._table
        if num_tokens and table.prefill == "splitwise_sim":
            return profile.prefill_s(num_tokens + num_decodes) * (_MIXED if num_decodes else 1.0)
        if not num_tokens and table.decode == "splitwise_sim":
            return profile.decode_s(1, num_decodes)
        return profile.step_s(chunks, num_decodes, num_context_tokens)


def step_costs(profile: Profile, table: CostsTable) -> StepCosts:
    """The costs that the table asks for, on an engine with this profile."""
    return profile if table == CostsTable() else SplitwiseSimCosts(profile, table)
