"""Splitwise's service levels: how many times as long a request takes as it would alone on an unloaded machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from actorserve.core.timing.profile import Profile
from actorserve.sim.measures.rows import Page
from actorserve.sim.statistics import between_ranks

Vector: TypeAlias = npt.NDArray[Any]

LIMITED_PERCENTILES: Final = (50, 90, 99)
"""The percentiles of a slowdown that have limits."""

_COMPARED: Final = ("ttft", "e2e")
"""The slowdowns whose medians are compared between the run's halves: a growing queue shows in both."""


class Reference:
    """How long each request takes alone on an unloaded machine: its prompt in one iteration, and then one iteration
    for each further token, whose context grows.
    """

    def __init__(self, profile: Profile, max_tokens: int) -> None:
        """``max_tokens``: prompt and output of the longest request."""
        lengths = range(max_tokens + 1)
        self._prefill_s = np.array([profile.prefill_s(num_tokens) for num_tokens in lengths])
        # The time of all decodes with a context of up to so many tokens.
        self._decodes_s = np.cumsum([profile.decode_s(1, num_tokens) for num_tokens in lengths])

    def ttft_s(self, page: Page) -> Vector:
        alone_s: Vector = self._prefill_s[page["num_prompt"]]
        return alone_s

    def decodes_s(self, page: Page) -> Vector:
        """The time of all tokens after the first."""
        num_prompt = page["num_prompt"]
        alone_s: Vector = self._decodes_s[num_prompt + page["num_output"] - 1] - self._decodes_s[num_prompt]
        return alone_s


def _ttft(page: Page, alone: Reference) -> Vector:
    slowdown: Vector = (page["first_token_s"] - page["arrived_s"]) / alone.ttft_s(page)
    return slowdown


def _tbt(page: Page, alone: Reference) -> Vector:
    several = page[page["num_output"] > 1]
    slowdown: Vector = (several["ended_s"] - several["first_token_s"]) / alone.decodes_s(several)
    return slowdown


def _e2e(page: Page, alone: Reference) -> Vector:
    slowdown: Vector = (page["ended_s"] - page["arrived_s"]) / (alone.ttft_s(page) + alone.decodes_s(page))
    return slowdown


_SLOWDOWNS: Final[Mapping[str, Callable[[Page, Reference], Vector]]] = {"ttft": _ttft, "tbt": _tbt, "e2e": _e2e}


@dataclass(frozen=True)
class ServiceLevels:
    """Limits on slowdowns against ``alone`` (Splitwise, section 5: its table of SLOs).

    ``limits``: of ``ttft``, ``tbt`` and ``e2e``, at ``LIMITED_PERCENTILES``. A request's TBT is the mean time between
    its tokens; a request of one token has none.

    A median slowdown of the requests that arrived in the second half of the arrivals' time may be ``max_growth`` times
    that of the first half. If it grows further, a queue grows, so that a longer run would break the limits.
    """

    alone: Reference
    limits: Mapping[str, Sequence[float]]
    max_growth: float

    def figures(self, pages: Iterable[Page]) -> dict[str, Any]:
        """The slowdowns of completed requests, their growth, and which limits are broken, as JSON values."""
        chosen = list(pages)
        arrived_s = _joined(page["arrived_s"] for page in chosen)
        middle_s = (arrived_s.min() + arrived_s.max()) / 2.0 if len(arrived_s) else 0.0
        slowdown: dict[str, dict[str, float] | None] = {}
        growth: dict[str, float | None] = {}
        breaks: list[str] = []
        for name, slowdown_of in _SLOWDOWNS.items():
            values = _joined(slowdown_of(page, self.alone) for page in chosen)
            slowdown[name] = found = _percentiles(values)
            for percent, limit in zip(LIMITED_PERCENTILES, self.limits[name], strict=True):
                if found is not None and found[f"p{percent}"] > limit:
                    breaks.append(f"{name}.p{percent}")
            if name in _COMPARED:
                growth[name] = grown = _growth(values, arrived_s > middle_s)
                if grown is not None and grown > self.max_growth:
                    breaks.append(f"growth.{name}")
        return {"slowdown": slowdown, "growth": growth, "breaks": breaks, "num_broken": len(breaks)}


def _growth(values: Vector, is_late: Vector) -> float | None:
    """None if no request arrived in one of the halves."""
    early, late = values[~is_late], values[is_late]
    return float(np.median(late) / np.median(early)) if len(early) and len(late) else None


def _percentiles(values: Vector) -> dict[str, float] | None:
    in_order = np.sort(values)
    if not len(in_order):
        return None
    return {f"p{percent}": between_ranks(in_order.item, len(in_order), percent) for percent in LIMITED_PERCENTILES}


def _joined(parts: Iterable[Vector]) -> Vector:
    return np.concatenate([np.empty(0), *parts])
