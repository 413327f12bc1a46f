"""How pressed a pool is, where 1 is what it is to bear.

- Prompts: the seconds of prompts that come in a second, and what waits, worked off within ``WINDOW_S``, over the
  instances, each busy for ``BUSY`` of its time. More would make queues, because prompts do not come evenly.
- Tokens: the time of an iteration beyond the shortest one, over what its target leaves for it, or the share of memory
  in use over ``FULL``, whichever is more. Both count the requests that decode on prompt instances as well, because
  these found no place in the token pool, or were there when the instance's role changed.

The sizes of the pools (``core.pools.sizing``) and the number of instances (``core.cluster.scaling``) follow it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Final

from actorserve.core.messages import InstanceRole
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.timing.speeds import InstanceSpeeds

WINDOW_S: Final = 10.0
"""The time over which the load of prompts is averaged, and in which prompts that wait are to be computed."""

BUSY: Final = 0.8
FULL: Final = 0.7  # of memory; what prompts reserve comes and goes by much more than what tokens take
_LEAST_SEEN_S: Final = 1.0  # because the first prompt in less time would say nothing of the rate
EASY: Final = 0.8
"""A pool that is less pressed bears its load easily."""


@dataclass(slots=True)
class _PromptLoad:
    """Seconds of prompts that came in the last ``WINDOW_S``; earlier ones fade away."""

    sum_s: float = 0.0
    at_s: float = 0.0
    since_s: float = inf  # when the first one came

    def add(self, prefill_s: float, now: float) -> None:
        self.since_s = min(self.since_s, now)
        self.sum_s = self.faded_s(now) + prefill_s
        self.at_s = now

    def drop(self, prefill_s: float, now: float) -> None:
        self.sum_s = max(0.0, self.faded_s(now) - prefill_s)
        self.at_s = now

    def faded_s(self, now: float) -> float:
        return self.sum_s * exp((self.at_s - now) / WINDOW_S)

    def per_s(self, now: float) -> float:
        """Seconds of prompts that come in a second, also if the first one came less than ``WINDOW_S`` ago."""
        if not self.sum_s:
            return 0.0
        seen_s = WINDOW_S * (1.0 - exp((self.since_s - now) / WINDOW_S))
        return self.faded_s(now) / max(seen_s, _LEAST_SEEN_S)


class PoolPressure:
    """Measures how pressed pools are. ``speeds`` are those of the fleet's instances."""

    def __init__(self, config: PoolsConfig, speeds: InstanceSpeeds) -> None:
        self._config = config
        self._speeds = speeds
        self._prompt_loads: dict[str, _PromptLoad] = defaultdict(_PromptLoad)  # by group

    def group_of(self, view: InstanceView) -> str:
        """Instances of different groups cannot help each other: those of different kinds, unless tokens may be computed
        by another kind than their prompts.
        """
        return "" if self._config.across_kinds else view.kind

    def on_place(self, view: InstanceView, num_tokens: int, now: float) -> None:
        """A prompt of ``num_tokens`` goes to this instance. What a mixed one computes presses no prompt pool."""
        if view.role is not InstanceRole.MIXED:
            self._prompt_loads[self.group_of(view)].add(self._speeds.prefill_s(view.peer, num_tokens), now)

    def on_refused(self, view: InstanceView, num_tokens: int, now: float) -> None:
        """The instance has not taken a prompt that just went there. So the prompt counts only where it goes next."""
        if view.role is not InstanceRole.MIXED:
            self._prompt_loads[self.group_of(view)].drop(self._speeds.prefill_s(view.peer, num_tokens), now)

    def of_prompts(self, prompts: Sequence[InstanceView], num_waiting_tokens: int, now: float) -> float:
        """The pressure on these prompt instances, of which there is one at least. Prompts of ``num_waiting_tokens``
        wait for any instance.
        """
        groups = dict.fromkeys([self.group_of(view) for view in prompts])
        load = sum([self._prompt_loads[group].per_s(now) for group in groups])
        waiting_s = sum([self._speeds.prefill_s(view.peer, view.pending_tokens) for view in prompts])
        waiting_s += self._speeds.prefill_s(prompts[0].peer, num_waiting_tokens)
        return (load + waiting_s / WINDOW_S) / (len(prompts) * BUSY)

    def of_tokens(self, tokens: Sequence[InstanceView], prompts: Sequence[InstanceView]) -> float:
        """The pressure on these token instances, of which there is one at least, beside these prompt instances."""
        num_running = sum([view.num_running for view in tokens])
        num_outside = sum([view.report.num_decoding for view in prompts])
        in_time = sum([self._share_of_target(view) for view in tokens]) / len(tokens)
        in_time *= 1.0 + num_outside / max(1, num_running)
        used_bytes = sum([view.report.virtual_usage_bytes + view.incoming_bytes for view in tokens])
        used_bytes += sum([view.report.kv_decoding_bytes for view in prompts])
        in_memory = used_bytes / max(1, sum([view.report.kv_total_bytes for view in tokens])) / FULL
        return max(in_time, in_memory)

    def _share_of_target(self, view: InstanceView) -> float:
        """How much of the time that an iteration may take beyond the shortest one is used. It grows in proportion to
        the requests, which the time of an iteration does not.
        """
        least_s = self._speeds.min_iteration_s(view.peer)
        spare_s = self._config.tpot_target_s - least_s
        used_s = view.report.decode_s - least_s
        return used_s / spare_s if spare_s > 0.0 else inf if used_s > 0.0 else 0.0
