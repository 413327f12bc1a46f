"""A minimum share for the classes below the most urgent one, so that none of them starves.

All lower classes together are due ``min_share`` of what is handed out, in equal parts. Two queues keep such accounts:

- The cluster's queue (``core.cluster.queue``) counts turns, one for each request that it dispatches. A class is due its
  part of every turn, its own turns included. It is owed at most one turn and never less than none.
- An instance's classes (``core.scheduling.priority_classes``) count seconds of service, settled once an iteration, in
  which many requests are served at once. Here a class is due its part of the others' service (``of_others``), so that
  what it is owed is the service that it alone must get to catch up. It may be in debt for its last iteration, because
  an iteration cannot be divided.

The two differ in their unit, in what they count as due, and in their bounds. Therefore the caller gives all three.
"""

from math import inf


class MinShare:
    """``min_share`` is from 0 to below 1. Raises: ValueError if it is not."""

    __slots__ = ("_min_share",)

    def __init__(self, min_share: float) -> None:
        if not 0.0 <= min_share < 1.0:
            raise ValueError(f"min_share is {min_share}; expected a share from 0 to below 1")
        self._min_share = min_share

    def of_all(self, num_lower_classes: int) -> float:
        """What one lower class is due, as a part of what all classes get."""
        return self._min_share / num_lower_classes

    def of_others(self, num_lower_classes: int) -> float:
        """What one lower class is due, as a part of what the other classes get."""
        share = self.of_all(num_lower_classes)
        return share / (1.0 - share)


class FairShare:
    """The account of one class: ``owed`` is what it is due and has not received, in turns or in seconds of service."""

    __slots__ = ("owed",)

    def __init__(self, owed: float = 0.0) -> None:
        self.owed = owed

    def settle(self, due: float, received: float, least: float = -inf, most: float = inf) -> None:
        """Credit what is due, subtract what was received, and bound ``owed`` (``most`` takes precedence)."""
        self.owed = min(max(self.owed + due - received, least), most)
