"""The virtual clock: actions in the order of their times."""

from collections.abc import Callable
from heapq import heappop, heappush


class Timeline:
    """Actions ordered by time, and by the order in which they were added. ``now`` is the time of the newest one that
    ran.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        """When the next action is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Call ``act`` at this time, after the actions that were added earlier for the same time."""
        self._num_added += 1
        heappush(self._heap, (at_s, self._num_added, act, arguments))

    def run_next(self) -> None:
        """Raises: IndexError if there is no action."""
        self.now, _, act, arguments = heappop(self._heap)
        act(*arguments)
