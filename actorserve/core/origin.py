"""What a core was made from: with its inputs, all that a replay needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actorserve.core.cluster import ClusterConfig, ClusterState
from actorserve.core.instance import InstanceConfig, InstanceState
from actorserve.core.mlfq import PROMOTE_AFTER_S
from actorserve.core.policies import MIN_SHARE, make_policy
from actorserve.core.profile import Profile
from actorserve.core.sessions import SessionsConfig, SessionsState
from actorserve.core.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class InstanceOrigin:
    """An instance: its sizes, its engine's profile, and its policy with that one's settings (``make_policy``)."""

    config: InstanceConfig
    profile: Profile
    policy: str
    promote_after_s: float = PROMOTE_AFTER_S
    promote_after_s_of: Mapping[int, float] = field(default_factory=dict)
    min_share: float = MIN_SHARE

    def make(self) -> InstanceState:
        """A new one. Raises: ValueError for a policy's name that is none."""
        times = StepTimes(self.profile)
        policy = make_policy(
            self.policy,
            times,
            promote_after_s=self.promote_after_s,
            promote_after_s_of=self.promote_after_s_of,
            min_share=self.min_share,
        )
        return InstanceState(self.config, policy, times)


Origin = InstanceOrigin | ClusterConfig | SessionsConfig


def make_core(origin: Origin) -> InstanceState | ClusterState | SessionsState:
    """A new core of an instance, of the coordinator, or of a gateway."""
    match origin:
        case InstanceOrigin():
            return origin.make()
        case ClusterConfig():
            return ClusterState(origin)
        case SessionsConfig():
            return SessionsState(origin)
