"""The cluster's membership: how processes meet, watch each other, and part. Deterministic; time is an argument."""

from actorserve.actors.membership.death_watch import WatchTimes
from actorserve.actors.membership.membership import Membership
from actorserve.actors.membership.refusals import RefusedPeer
from actorserve.actors.membership.roles import COORDINATOR_NAME, MAX_PEERS, are_linked

__all__ = ["COORDINATOR_NAME", "MAX_PEERS", "Membership", "RefusedPeer", "WatchTimes", "are_linked"]
