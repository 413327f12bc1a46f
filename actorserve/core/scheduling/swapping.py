"""Proactive KV swapping (FastServe, section 4.2): make room ahead of need, so that no iteration waits for a copy.

Requests are ranked by their estimated next scheduling time, ENST. The requests with the largest ENST give up their
device blocks first, those with the smallest get theirs back first, and the copies run in parallel to the iterations.
Some blocks stay free for future requests; how many depends on the arrivals of the last seconds.

The paper leaves some rules open. Here a request makes room only at the cost of requests with a larger ENST. Room that
the copies in flight will free is counted, so that nothing is swapped out twice for one need. No request gets room
before all requests with a smaller ENST have it. And a request that has come to the device stays for as much service as
swapping it in and out cost, and for at least one token. Otherwise, if more requests wait than fit, promotions would
swap requests in and out, or compute them again and again, without any progress.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes


class SwapMode(StrEnum):
    """What happens to the KV of a request that has to give up its device blocks."""

    PROACTIVE = "proactive"  # copied to the host ahead of need, in parallel to the iterations
    REACTIVE = "reactive"  # copied to the host at need, and the next iteration waits for it
    RECOMPUTE = "recompute"  # dropped, and computed again


class ArrivalReserve:
    """How many blocks to keep free for new requests: the most that requests needed at once in the last seconds.

    "At once" is within ``window_s``, the time that it takes to make room. A burst is remembered for 64 windows.
    """

    _NUM_WINDOWS = 64

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._arrived: deque[tuple[int, int]] = deque()  # number of the window, blocks of the requests that came in it

    def on_arrival(self, num_blocks: int, now: float) -> None:
        window = int(now / self._window_s)
        if self._arrived and self._arrived[-1][0] == window:
            num_blocks += self._arrived.pop()[1]
        self._arrived.append((window, num_blocks))

    def num_blocks(self, now: float) -> int:
        oldest = int(now / self._window_s) - self._NUM_WINDOWS
        while self._arrived and self._arrived[0][0] < oldest:
            self._arrived.popleft()
        return max((num_blocks for _, num_blocks in self._arrived), default=0)


class Swapper:
    """Moves requests to the device and away from it, and accounts for the cost."""

    def __init__(self, memory: KVMemory, times: StepTimes, mode: SwapMode) -> None:
        self._memory = memory
        self._times = times
        self._mode = mode
        self.num_preemptions = 0

    def evict(self, request: Request) -> None:
        """Swap a request out, or drop its KV if the host is full or computing it again is cheaper."""
        recompute_s = self._times.prefill_s(request.num_fed)
        if (
            self._mode is SwapMode.RECOMPUTE
            or recompute_s <= 2.0 * self._times.swap_s(self._memory.swap_bytes(request))
            or not self._memory.swap_out(request)
        ):
            self.drop(request)
        else:
            self.num_preemptions += 1

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks, which are free. It stays for as long as recomputing its KV takes."""
        self._memory.start(request)
        recompute_s = (
            self._times.prefill_s(request.num_uncomputed) if request.num_output > request.resumed_output else 0.0
        )
        request.owed_s = max(recompute_s, self._times.min_iteration_s)

    def bring_back(self, request: Request, *, is_due: bool) -> None:
        """Begin to swap in a request whose blocks are free. If it is not due yet, it may be evicted before it runs."""
        both_ways_s = 2.0 * self._times.swap_s(self._memory.swap_bytes(request))
        self._memory.swap_in(request)
        request.owed_s = max(both_ways_s, self._times.min_iteration_s) if is_due else 0.0

    def on_token(self, request: Request, service_s: float) -> None:
        """A request got a token, and was served for ``service_s``."""
        if request.owed_s > 0.0:
            request.owed_s -= max(service_s, self._times.min_iteration_s)

    def drop(self, request: Request) -> None:
        """Drop a request's KV, wherever it lies, so that it is computed again."""
        self.num_preemptions += 1
        self._memory.drop(request)


class BlockBudget:
    """Counts blocks that are free now or soon, while one iteration is planned. Promised blocks no longer count."""

    def __init__(self, memory: KVMemory, swapper: Swapper, ranking: Sequence[Request]) -> None:
        """``ranking``: all requests, the smallest ENST first. Requests are evicted from its end."""
        self._memory = memory
        self._swapper = swapper
        self._ranking = ranking
        self._next_victim = len(ranking) - 1
        self._num_promised = 0

    def make(self, num_blocks: int, ahead_of: int, spare: int = 0) -> bool:
        """Promise ``num_blocks`` blocks, with ``spare`` more left free. May evict requests ranked behind ``ahead_of``.

        False if evicting all of these does not suffice. Then nothing is promised, but they have been evicted.
        """
        while self._num_coming < num_blocks + spare:
            if self._next_victim <= ahead_of:
                return False
            victim = self._ranking[self._next_victim]
            if victim.is_resident and victim.owed_s <= 0.0:
                self._swapper.evict(victim)
            self._next_victim -= 1
        self._num_promised += num_blocks
        return True

    def promise(self, num_blocks: int) -> None:
        """Set ``num_blocks`` blocks aside, even if fewer are free."""
        self._num_promised += num_blocks

    def hand_out(self, num_blocks: int) -> None:
        """Promised blocks were taken."""
        self._num_promised -= num_blocks

    @property
    def _num_coming(self) -> int:
        return self._memory.device.num_free_blocks + self._memory.num_freeing_blocks - self._num_promised
