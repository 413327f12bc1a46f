"""The objects that the components of one instance share."""

from dataclasses import dataclass, replace

from actorserve.core.effects import Effects
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.scheduling.batching import Batcher
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.timing.step_times import StepTimes


@dataclass(frozen=True, slots=True, eq=False)
class InstanceParts:
    """One instance's requests and what schedules them. ``requests``, by id, wait or have started."""

    config: InstanceConfig
    requests: dict[str, Request]
    memory: KVMemory
    policy: SchedulingPolicy
    times: StepTimes
    batcher: Batcher
    effects: Effects

    def set_priority(self, request: Request, priority: int, now: float) -> None:
        """An operator changes the priority of a request that is here. It keeps its level, and what it attained."""
        attained = self.policy.attained(request, now)
        self.policy.remove(request)
        request.spec = replace(request.spec, priority=priority)
        self.policy.add(request, now, request.num_computed, attained)
