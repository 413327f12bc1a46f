"""How many instances compute prompts, and how many the tokens after them: as the load needs.

Splitwise chooses the sizes of its pools beforehand, for one load ("Provisioning with Splitwise"). Its mixed pool evens
out short peaks: a drafted instance does both phases, so each phase disturbs the other one there. If the mix of prompts
and tokens changes for longer, instances change their pool instead.

Once in ``PERIOD_S`` the pool that is more pressed (``core.pools.pressure``) gets instances of the other one, unless it
bears its load easily or the other one would then be more pressed than it. A change costs little: a token instance's
requests move away while they decode, and a prompt instance hands over what it has. But the load measured just after a
change still shows the former pools, so the next change goes in the same direction, or ``REST_S`` later.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import Final

from actorserve.core.messages import InstanceRole, Peer
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView
from actorserve.core.pools.pressure import EASY, PoolPressure
from actorserve.core.timing.speeds import InstanceSpeeds

PERIOD_S: Final = 1.0
REST_S: Final = 10.0
_PART: Final = 16  # at most one instance in so many changes at once, because each moves requests


class PoolSizing:
    """Decides which instances change from one pool to the other. Mixed instances stay mixed.

    Instances that cannot help each other are sized apart (``PoolPressure.group_of``).
    """

    def __init__(self, fleet: Fleet, speeds: InstanceSpeeds, pressure: PoolPressure) -> None:
        """``speeds`` are those of the fleet's instances, and ``pressure`` that of its pools."""
        self._fleet = fleet
        self._speeds = speeds
        self._pressure = pressure
        self._changed: dict[str, tuple[InstanceRole, float]] = {}  # by group: the role given last, and when
        self._next_s = -inf

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
                groups[self._pressure.group_of(view)].append(view)
        kept = set(fixed)
        return [
            change
            for group, views in groups.items()
            for change in self._resize(group, views, kept, num_waiting_tokens, now)
        ]

    def _resize(
        self, group: str, views: list[InstanceView], kept: set[Peer], num_waiting_tokens: int, now: float
    ) -> list[tuple[InstanceView, InstanceRole]]:
        prompts = [view for view in views if view.role is InstanceRole.PROMPT]
        tokens = [view for view in views if view.role is InstanceRole.TOKEN]
        if not prompts or not tokens:
            return []
        of_prompts = self._pressure.of_prompts(prompts, num_waiting_tokens, now)
        of_tokens = self._pressure.of_tokens(tokens, prompts)
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


def _is_evener(more: tuple[float, list[InstanceView]], less: tuple[float, list[InstanceView]], num_given: int) -> bool:
    """Whether the pool that gives so many instances keeps one, and is then not the more pressed one of the two."""
    (pressure, views), (other_pressure, other_views) = more, less
    if num_given >= len(other_views):
        return False
    other_after = other_pressure * len(other_views) / (len(other_views) - num_given)
    return other_after <= pressure * len(views) / (len(views) + num_given)
