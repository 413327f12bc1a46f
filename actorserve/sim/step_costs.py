"""What an iteration of a simulated engine costs: its profile's time, or the time by the rules of SplitwiseSim.

SplitwiseSim (Mutinifni/splitwise-sim) is the simulator that Splitwise was published with. Results of both simulators
compare only if both cost the same work the same, so each of its two rules can be chosen. Neither is a good model:

- A decode's time is looked up in a table by tokens of context, with the number of requests in place of the tokens. So
  64 requests take 1.01 times as long as one request, and the length of their context does not matter.
- An iteration with prompts takes as long as one prompt of all its tokens, and 1.1 times as long if decodes share it.

Both rules look times up in one table of measured medians, and not in a profile, which is fitted to the measurements: a
decode that takes 2 % longer lengthens waiting times much more where requests almost fill the memory.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol, Self

from pydantic import Field, model_validator

from actorserve.core.timing.profile import Curve, Profile
from actorserve.sim.tables import Table

_MIXED: Final = 1.1  # the factor of an iteration with prompts and decodes
_MAX_POINTS: Final = 1000

Rule = Literal["profile", "splitwise_sim"]


class LookupTable(Table):
    """The times that SplitwiseSim looks up for a kind of machine, in lists of equal length. Between two points and
    beyond them a time lies on a straight line.
    """

    profile: str = Field(min_length=1, description="the profile of the groups of instances that it is for")
    tokens: tuple[int, ...] = Field(
        strict=False, max_length=_MAX_POINTS, description="two or more growing numbers of tokens in an iteration"
    )
    prefill_s: tuple[float, ...] = Field(
        strict=False, max_length=_MAX_POINTS, description="seconds to prefill so many tokens"
    )
    decode_s: tuple[float, ...] = Field(
        strict=False, max_length=_MAX_POINTS, description="seconds of a decode with so many tokens of context"
    )

    @property
    def prefill(self) -> Curve:
        return _line_through(self.tokens, self.prefill_s)

    @property
    def decode(self) -> Curve:
        return _line_through(self.tokens, self.decode_s)

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        for name in ("prefill_s", "decode_s"):
            try:
                _line_through(self.tokens, getattr(self, name))
            except ValueError:
                raise ValueError(
                    f"{name} makes no line of times: expected a time for each of tokens, which are two or more and "
                    "grow from above 0, and times that do not fall, and stay above 0 on the first line down to 0 tokens"
                ) from None
        return self


class CostsTable(Table):
    """Which rules give the time of an iteration. The scheduler always plans with the profile's."""

    decode: Rule = Field("profile", description="rule for iterations without prompts")
    prefill: Rule = Field("profile", description="rule for iterations with prompts, whether decodes share them or not")
    lookups: tuple[LookupTable, ...] = Field(
        (), strict=False, max_length=100, description="tables for the rule splitwise_sim, one for each profile"
    )

    @property
    def are_of_profile(self) -> bool:
        """Whether the profile gives all times."""
        return self.decode == self.prefill == "profile"

    def lookup_of(self, profile: str) -> LookupTable | None:
        """The table for groups with the profile of this name."""
        return next((table for table in self.lookups if table.profile == profile), None)


class StepCosts(Protocol):
    """A ``Profile`` is one."""

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of an iteration of prefill chunks, each (tokens, tokens before it), and of decodes that share it."""
        ...


class SplitwiseSimCosts:
    """SplitwiseSim's rule for decodes, for prefills, or for both; otherwise the profile's."""

    def __init__(self, profile: Profile, table: CostsTable, lookup: LookupTable) -> None:
        self._profile = profile
        self._prefill = lookup.prefill if table.prefill == "splitwise_sim" else None
        self._decode = lookup.decode if table.decode == "splitwise_sim" else None

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int, num_context_tokens: int) -> float:
        num_tokens = sum([tokens for tokens, _ in chunks])
        if num_tokens and self._prefill is not None:
            return self._prefill(num_tokens + num_decodes) * (_MIXED if num_decodes else 1.0)
        if not num_tokens and self._decode is not None:
            return self._decode(num_decodes)
        return self._profile.step_s(chunks, num_decodes, num_context_tokens)


def step_costs(profile: Profile, name: str, table: CostsTable) -> StepCosts:
    """The costs that the table asks for, on an engine with this profile, which groups know by ``name``."""
    if table.are_of_profile:
        return profile
    lookup = table.lookup_of(name)
    assert lookup is not None
    return SplitwiseSimCosts(profile, table, lookup)


def _line_through(tokens: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Straight lines through the points; the first one goes on to 0 tokens. Raises: ValueError for impossible times."""
    if not len(seconds) == len(tokens) >= 2 or not 0 < tokens[0] < tokens[1]:
        raise ValueError("there must be a time for each number of tokens, and the numbers must grow")
    slope = (seconds[1] - seconds[0]) / (tokens[1] - tokens[0])
    first_s = seconds[0] - slope * tokens[0]
    if first_s <= 0.0:
        raise ValueError("a time must be above 0")
    return Curve((0.0, *map(float, tokens)), (first_s, *seconds))
