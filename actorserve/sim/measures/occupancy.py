"""How many tokens iterations hold, over time (Splitwise, figure 17: batching on prompt, token and mixed machines).

An iteration's tokens are those of prompts and one for each request that decodes. A time without an iteration counts as
one with no tokens. What happens after the last arrival does not count, because the cluster then only empties.
"""

from typing import Any, Final

_SHARES: Final = (10, 25, 50, 75, 90, 99)
_STEPS: Final = (0, *(2**power for power in range(14)))


class Occupancy:
    """Seconds of iterations by their number of tokens, until ``until_s``."""

    __slots__ = ("alive_s", "seconds", "until_s")

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.seconds: dict[int, float] = {}
        self.alive_s = 0.0  # of the instances whose iterations these are

    def add(self, num_tokens: int, duration_s: float, end_s: float) -> None:
        """An iteration of so many tokens took ``duration_s``, and ended at ``end_s``."""
        if end_s > self.until_s:
            duration_s -= min(duration_s, end_s - self.until_s)
        if duration_s > 0.0:
            self.seconds[num_tokens] = self.seconds.get(num_tokens, 0.0) + duration_s

    def live(self, born_s: float, end_s: float) -> None:
        """An instance lived so long."""
        self.alive_s += max(0.0, min(end_s, self.until_s) - born_s)

    def merge(self, other: "Occupancy") -> None:
        self.alive_s += other.alive_s
        for num_tokens, seconds in other.seconds.items():
            self.seconds[num_tokens] = self.seconds.get(num_tokens, 0.0) + seconds

    def figures(self) -> dict[str, Any]:
        """``busy``: the share of time with an iteration. ``tokens``: the mean of an iteration's tokens, and the numbers
        of tokens that so many percent of the time in iterations do not exceed. ``at_most``: the shares of all time with
        no more tokens than that.
        """
        in_order = sorted(self.seconds.items())
        busy_s = sum(seconds for _, seconds in in_order)
        if not busy_s or not self.alive_s:
            return {"busy": 0.0, "tokens": None, "at_most": dict.fromkeys(map(str, _STEPS), 1.0)}
        mean = sum(num_tokens * seconds for num_tokens, seconds in in_order) / busy_s
        tokens = {"mean": mean} | {f"p{share}": _at_share(in_order, busy_s * share / 100) for share in _SHARES}
        over_s = {step: sum(seconds for num_tokens, seconds in in_order if num_tokens > step) for step in _STEPS}
        at_most = {str(step): max(0.0, 1.0 - seconds / self.alive_s) for step, seconds in over_s.items()}
        return {"busy": busy_s / self.alive_s, "tokens": tokens, "at_most": at_most}


def _at_share(in_order: list[tuple[int, float]], wanted_s: float) -> int:
    """The number of tokens up to which the iterations take so many seconds."""
    sum_s = 0.0
    for num_tokens, seconds in in_order:
        sum_s += seconds
        if sum_s >= wanted_s:
            return num_tokens
    return in_order[-1][0]
