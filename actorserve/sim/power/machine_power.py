"""The power of simulated machines, which follows what they compute and how they are capped.

A machine has full power (``watts`` of its group, which are those of its GPUs), and takes a share of that: without an
iteration ``idle_draw``, in an iteration without prompts the curves' draw of tokens, and in one with prompts their draw
of prompts, less where the prompts are short. A cap bounds the share, and makes iterations longer by the curves. Draws
and the curves are those of ``core.power.curves``, by which the governor caps.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from actorserve.core.power.curves import CURVES, PhaseCurves, PowerCurve
from actorserve.sim.tables import Table

PROMPT_SHARES: Final = ((128, 0.69), (256, 0.72), (512, 0.88), (1024, 1.0))
"""Of the draw of long prompts, by an iteration's tokens of prompts: the peaks in SplitwiseSim's published profile, with
BLOOM-176B on 8 A100, one prompt of 128 to 8,192 tokens, and up to 16 prompts of 512. For H100 it is an assumption.
"""

_HALF: Final = 0.5


class PowerTable(Table):
    """How much power machines take. Without ``curves`` there are no figures about energy."""

    curves: Literal["h100", "a100"] | None = Field(
        None, description="h100 or a100: the draws and cap curves of machines"
    )
    idle_draw: float = Field(0.2, ge=0, le=1, description="share of full power without an iteration; an assumption")
    token_draw: float | None = Field(
        None, gt=0, le=1, description="share of full power in iterations without prompts; default: the curves'"
    )
    slowdown_at_half: float | None = Field(
        None,
        ge=1,
        le=10,
        description="how many times as long iterations without prompts take at half power; default: the curves'",
    )
    prompt_slowdown_at_half: float | None = Field(
        None,
        ge=1,
        le=2,
        description="how many times as long iterations with prompts take at half power; default: the curves'",
    )
    least_cap: float = Field(
        0.25, gt=0, le=1, description="the lowest cap that machines allow, as a share of full power"
    )
    budget: float | None = Field(
        None,
        gt=0,
        le=1,
        description="what all machines together may take, as a share of their full power; the coordinator's governor "
        "then caps them; default: no budget",
    )

    @property
    def phase_curves(self) -> PhaseCurves:
        """Raises: KeyError without ``curves``."""
        found = CURVES[self.curves or ""]
        if self.token_draw is not None:
            found = replace(found, token_draw=self.token_draw)
        if self.slowdown_at_half is not None:
            factor = self.slowdown_at_half
            found = replace(found, token=PowerCurve((_HALF / 2, _HALF, 1.0), (2.0 * factor, factor, 1.0)))
        if self.prompt_slowdown_at_half is not None:
            least, factor_at_least = found.prompt.fractions[0], found.prompt.factors[0]
            curve = PowerCurve((least, _HALF, 1.0), (factor_at_least, self.prompt_slowdown_at_half, 1.0))
            found = replace(found, prompt=curve)
        return found

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.curves is None and self.model_fields_set - {"curves"}:
            raise ValueError("curves is missing: expected h100 or a100, because without them there is no power")
        return self


@dataclass(slots=True)
class MachineEnergy:
    """The energy of machines, by what they did; the output tokens that they made; and what their caps allowed."""

    idle_j: float = 0.0
    prompt_j: float = 0.0  # in iterations with prompts
    token_j: float = 0.0  # in iterations without prompts
    allowed_j: float = 0.0
    full_j: float = 0.0  # at full power all the time
    num_tokens: int = 0

    @property
    def joules(self) -> float:
        return self.idle_j + self.prompt_j + self.token_j

    def add(self, other: "MachineEnergy") -> None:
        for name in fields(self):
            setattr(self, name.name, getattr(self, name.name) + getattr(other, name.name))

    def figures(self) -> dict[str, Any]:
        """``cap``: the mean of the caps over time, as a share of full power. ``power``: the same of what was taken."""
        joules = self.joules
        return {
            "joules": joules,
            "idle_share": self.idle_j / joules if joules else 0.0,
            "prompt_share": self.prompt_j / joules if joules else 0.0,
            "tokens_per_joule": self.num_tokens / joules if joules else 0.0,
            "tokens_per_allowed_joule": self.num_tokens / self.allowed_j if self.allowed_j else 0.0,
            "power": joules / self.full_j if self.full_j else 0.0,
            "cap": self.allowed_j / self.full_j if self.full_j else 1.0,
        }


class MachinePower:
    """The power of one machine, under a cap that may change. What happens after ``until_s`` does not count.

    An iteration takes power under the cap that its time holds under, also when the cap changes meanwhile. A machine
    without an iteration takes power under the cap of the moment.
    """

    __slots__ = (
        "_cap_since_s",
        "_caps",
        "_curves",
        "_idle_draw",
        "_idle_since_s",
        "_until_s",
        "cap",
        "energy",
        "full_watts",
    )

    def __init__(self, table: PowerTable, full_watts: float, cap: float, born_s: float, until_s: float) -> None:
        """``cap``: as a share of full power."""
        self._curves = table.phase_curves
        self._idle_draw = table.idle_draw
        self._cap_since_s = self._idle_since_s = born_s
        self._caps = deque([(born_s, cap)])  # the caps with their beginnings, from the one at ``_idle_since_s`` on
        self._until_s = until_s
        self.full_watts = full_watts
        self.cap = cap
        self.energy = MachineEnergy()

    def set_cap(self, cap: float, now: float) -> None:
        self._count_cap(now)
        self.cap = cap
        self._caps.append((now, cap))

    def _count_cap(self, now: float) -> None:
        since_s, self._cap_since_s = self._cap_since_s, now
        duration_s = max(0.0, min(now, self._until_s) - since_s)
        self.energy.allowed_j += duration_s * self.cap * self.full_watts
        self.energy.full_j += duration_s * self.full_watts

    def _count_idle(self, end_s: float) -> None:
        """There was no iteration from ``_idle_since_s`` to ``end_s``."""
        end_s = min(end_s, self._until_s)
        while self._caps:
            _, cap = self._caps[0]
            cap_end_s = self._caps[1][0] if len(self._caps) > 1 else inf
            part_s = max(0.0, min(end_s, cap_end_s) - self._idle_since_s)
            self.energy.idle_j += part_s * self.full_watts * min(self._idle_draw, cap)
            self._idle_since_s += part_s
            if cap_end_s > end_s:
                break
            self._caps.popleft()

    @property
    def prefill_factor(self) -> float:
        """How many times as long prompts take under the cap."""
        return self._curves.prompt.factor(self.cap)

    @property
    def decode_factor(self) -> float:
        """How many times as long tokens take under the cap."""
        return self._curves.token.factor(self.cap)

    def watts(self, num_prompt_tokens: int, cap: float) -> float:
        """In an iteration with so many tokens of prompts, under this cap."""
        draw = self._curves.token_draw
        if num_prompt_tokens:
            draw = max(draw, self._curves.prompt_draw * _share_of(num_prompt_tokens))
        return self.full_watts * min(draw, cap)

    def add(self, num_prompt_tokens: int, num_tokens: int, duration_s: float, end_s: float, cap: float) -> None:
        """An iteration with so many tokens of prompts took ``duration_s``, and ended at ``end_s``, when it had made
        ``num_tokens`` output tokens. Its time holds under ``cap``. Iterations are added in order.
        """
        energy = self.energy
        self._count_idle(end_s - duration_s)
        self._idle_since_s = end_s
        if end_s > self._until_s:
            duration_s -= min(duration_s, end_s - self._until_s)
            num_tokens = 0
        energy.num_tokens += num_tokens
        if num_prompt_tokens:
            energy.prompt_j += duration_s * self.watts(num_prompt_tokens, cap)
        else:
            energy.token_j += duration_s * self.watts(0, cap)

    def end(self, end_s: float) -> MachineEnergy:
        """The energy of its life."""
        self._count_cap(end_s)
        self._count_idle(end_s)
        return self.energy


def _share_of(num_prompt_tokens: int) -> float:
    """Between two points the share lies on a straight line."""
    place = bisect_right(PROMPT_SHARES, (num_prompt_tokens, 1.0))
    if place == 0:
        return PROMPT_SHARES[0][1]
    if place == len(PROMPT_SHARES):
        return PROMPT_SHARES[-1][1]
    (low, low_share), (high, high_share) = PROMPT_SHARES[place - 1], PROMPT_SHARES[place]
    return low_share + (high_share - low_share) * (num_prompt_tokens - low) / (high - low)
