"""How many instances compute prompts, and how many the tokens after them: as the load needs.

Splitwise chooses the sizes of its pools beforehand, for one load ("Provisioning with Splitwise"). Its mixed pool evens
out short peaks: a drafted instance does both phases, so each phase disturbs the other one there. If the mix of prompts
and tokens changes for longer, instances change their pool instead.

How pressed a pool is, where 1 is what it is to bear:

- prompts: the seconds of prompts that come in a second, and what waits, worked off within ``WINDOW_S``, over the
  instances, each busy for ``BUSY`` of its time. More would make queues, because prompts do not come evenly.
- tokens: the time of an iteration beyond the shortest one, over what its target leaves for it, or the share of memory
  in use over ``FULL``, whichever is more. Both count the requests that decode on drafted prompt instances as well,
  because these found no place in the token pool.

Once in ``PERIOD_S`` the pool that is more pressed gets instances of the other one, unless it bears its load easily or
the other one would then be more pressed than it. A change costs little: a token instance's requests move away while
they decode, and a prompt instance hands over what it has. But the load measured just after a change still shows the
former pools, so the next change goes in the same direction, or ``REST_S`` later.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf
from typing import Final

from actorserve.core.messages import InstanceRole, Peer
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.config import PoolsConfig
from actorserve.core.timing.speeds import InstanceSpeeds

WINDOW_S: Final = 10.0
"""The time over which the load of prompts is averaged, and in which prompts that wait are to be computed."""

PERIOD_S: Final = 1.0
REST_S: Final = 10.0
BUSY: Final = 0.8
FULL: Final = 0.7  # of memory; what prompts reserve comes and goes by much more than what tokens take
EASY: Final = 0.8
"""A pool that is less pressed gets no further instances."""

_PART: Final = 16  # at most one instance in so many changes at once, because each moves requests


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

    def faded_s(self, now: float) -> float:
        return self.sum_s * exp((self.at_s - now) / WINDOW_S)

    def per_s(self, now: float) -> float:
        """Seconds of prompts that come in a second, also if the first one came less than ``WINDOW_S`` ago."""
        if not self.sum_s:
            return 0.0
        seen_s = WINDOW_S * (1.0 - exp((self.since_s - now) / WINDOW_S))
        return self.faded_s(now) / max(seen_s, PERIOD_S)


class PoolSizing:
    """Decides which instances change from one pool to the other. Mixed instances stay mixed.

    Instances of different kinds are sized apart, unless tokens may be computed by another kind than their prompts.
    """

    def __init__(self, config: PoolsConfig, fleet: Fleet, speeds: InstanceSpeeds) -> None:
        """``speeds`` are those of the fleet's instances."""
        self._config = config
        self._fleet = fleet
        self._speeds = speeds
        self._prompt_loads: dict[str, _PromptLoad] = defaultdict(_PromptLoad)  # by group
        self._changed: dict[str, tuple[InstanceRole, float]] = {}  # by group: the role given last, and when
        self._next_s = -inf

    def on_place(self, view: InstanceView, num_tokens: int, now: float) -> None:
        """A prompt of ``num_tokens`` goes to this instance. What a mixed one computes presses no prompt pool."""
        if view.role is InstanceRole.MIXED:
            return
        self._prompt_loads[self._group_of(view)].add(self._speeds.prefill_s(view.peer, num_tokens), now)

    def round(
        self, now: float, num_waiting_tokens: int = 0, fixed: Iterable[Peer] = ()
    ) -> list[tuple[InstanceView, InstanceRole]]:
        """The instances that are to change their role now.

        Prompts of ``num_waiting_tokens`` wait for an instance. The ``fixed`` instances keep their role.
        """
        if now < self._next_s:
            return []
        self._next_s = now + PERIOD_S
        groups: dict[str, list[InstanceView]] = defaultdict(list)
        for view in self._fleet.views.values():
            if view.is_healthy:
                groups[self._group_of(view)].append(view)
        kept = set(fixed)
        return [
            change
            for group, views in groups.items()
            for change in self._resize(group, views, kept, num_waiting_tokens, now)
        ]

    def _group_of(self, view: InstanceView) -> str:
        return "" if self._config.across_kinds else view.kind

    def _resize(
        self, group: str, views: list[InstanceView], kept: set[Peer], num_waiting_tokens: int, now: float
    ) -> list[tuple[InstanceView, InstanceRole]]:
        prompts = [view for view in views if view.role is InstanceRole.PROMPT]
        tokens = [view for view in views if view.role is InstanceRole.TOKEN]
        if not prompts or not tokens:
            return []
        of_prompts = self._prompt_pressure(self._prompt_loads[group], prompts, num_waiting_tokens, now)
        of_tokens = self._token_pressure(tokens, prompts)
        if of_prompts > of_tokens:
            role, more, less = InstanceRole.PROMPT, (of_prompts, prompts), (of_tokens, tokens)
        else:
            role, more, less = InstanceRole.TOKEN, (of_tokens, tokens), (of_prompts, prompts)
        former_role, changed_s = self._changed.get(group, (role, -inf))
        if more[0] <= EASY or (role is not former_role and now < changed_s + REST_S):
            return []
        givers = self._givers([view for view in less[1] if view.peer not in kept], role)
        most = max(1, len(views) // _PART)
        num_given = 0
        while num_given < min(most, len(givers)) and _is_evener(more, less, num_given + 1):
            num_given += 1
        if num_given:
            self._changed[group] = role, now
        return [(view, role) for view in givers[:num_given]]

    def _givers(self, views: list[InstanceView], role: InstanceRole) -> list[InstanceView]:
        """The instances that would change to ``role``, the best one first: the fastest ones compute prompts, because
        tokens gain less by speed. Of equally fast ones those with the least work of their own change.
        """
        sign = 1.0 if role is InstanceRole.PROMPT else -1.0
        return sorted(views, key=lambda view: (sign * self._speeds.prefill_s(view.peer, 1024), -view.score, view.peer))

    # --- how pressed the pools are -----------------------------------------------------------------------------------

    def _prompt_pressure(
        self, load: _PromptLoad, prompts: list[InstanceView], num_waiting_tokens: int, now: float
    ) -> float:
        waiting_s = sum(self._speeds.prefill_s(view.peer, view.pending_tokens) for view in prompts)
        waiting_s += self._speeds.prefill_s(prompts[0].peer, num_waiting_tokens)
        return (load.per_s(now) + waiting_s / WINDOW_S) / (len(prompts) * BUSY)

    def _token_pressure(self, tokens: list[InstanceView], prompts: list[InstanceView]) -> float:
        num_running = sum(view.num_running for view in tokens)
        num_without_place = sum([view.report.num_decoding for view in prompts if view.is_drafted])
        if not num_running:
            return inf if num_without_place else 0.0
        in_time = sum([self._share_of_target(view) for view in tokens]) / len(tokens)
        used_bytes = sum([view.report.virtual_usage_bytes + view.incoming_bytes for view in tokens])
        in_memory = used_bytes / max(1, sum([view.report.kv_total_bytes for view in tokens])) / FULL
        return max(in_time, in_memory) * (num_running + num_without_place) / num_running

    def _share_of_target(self, view: InstanceView) -> float:
        """How much of the time that an iteration may take beyond the shortest one is used. It grows in proportion to
        the requests, which the time of an iteration does not.
        """
        least_s = self._speeds.min_iteration_s(view.peer)
        spare_s = self._config.tpot_target_s - least_s
        used_s = view.report.decode_s - least_s
        return used_s / spare_s if spare_s > 0.0 else inf if used_s > 0.0 else 0.0


def _is_evener(more: tuple[float, list[InstanceView]], less: tuple[float, list[InstanceView]], num_given: int) -> bool:
    """Whether the pool that gives so many instances keeps one, and is then not the more pressed one of the two."""
    (pressure, views), (other_pressure, other_views) = more, less
    if num_given >= len(other_views):
        return False
    other_after = other_pressure * len(other_views) / (len(other_views) - num_given)
    return other_after <= pressure * len(views) / (len(views) + num_given)
