"""The dispatch rules by the names that settings give them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from actorserve.core.placement.baselines import LeastLoaded, RoundRobin
from actorserve.core.placement.dispatch import DispatchRule, HighestFreeness
from actorserve.core.placement.shortest_queue import ShortestQueue

DISPATCH_RULES: Final[Mapping[str, DispatchRule]] = MappingProxyType(
    {
        "freeness": HighestFreeness(),
        "shortest_queue": ShortestQueue(),
        "least_loaded": LeastLoaded(),
        "round_robin": RoundRobin(),
    }
)
