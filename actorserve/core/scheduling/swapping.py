"""Proactive KV swapping (FastServe, section 4.2): make room ahead of need, so that no iteration waits for a copy.

Requests are ranked by their estimated next scheduling time, ENST. The requests with the largest ENST give up their
device blocks first, those with the smallest get theirs back first, and the copies run in parallel to the iterations.

The paper leaves some rules open. These are ours:

- A request makes room only at the cost of requests with a larger ENST, and nothing is evicted if that does not make
  enough room. Room that the copies in flight will free is counted, so that nothing is swapped out twice for one need.
- For an admission only such requests are evicted whose KV the host has room for, or that are computed again for almost
  nothing, because losing more KV costs more than the admission gains. A request that runs and needs one more block may
  also have KV dropped, the shortest first.
- If the host is full, the requests ranked last lose the KV that lies there, as far as computing it again takes little
  of the service that they have had. Otherwise new requests would wait for the end of long ones as soon as the host is
  full. It would cost more to drop KV from the device, because the requests ranked last return last.
- A request that was swapped in stays for as much service as copying the whole device memory out and in takes.
  Otherwise, if more requests wait than fit, promotions would keep the link busy with copies in place of progress.

The paper also keeps blocks free for future requests. In simulations this gained new requests nothing, because making
room takes one iteration, and the mean time per token was 6 to 17 % longer, so it is left out.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.timing.step_times import StepTimes

_LITTLE = 0.125
"""Of the decodes that a request has had. It will get about as many at its next turn, because quanta double."""


class SwapMode(StrEnum):
    """What happens to the KV of a request that has to give up its device blocks."""

    PROACTIVE = "proactive"  # copied to the host ahead of need, in parallel to the iterations
    REACTIVE = "reactive"  # copied to the host at need, and the next iteration waits for it
    RECOMPUTE = "recompute"  # dropped, and computed again


class Swapper:
    """Moves requests to the device and away from it, and accounts for the cost."""

    def __init__(self, memory: KVMemory, times: StepTimes, mode: SwapMode) -> None:
        self._memory = memory
        self._times = times
        self._mode = mode
        self.num_preemptions = 0
        self.notes: list[tuple[str, str]] = []
        """(request id, what happened to its KV) since the instance took them last."""

    def may_evict(self, request: Request, num_promised: int) -> bool:
        """Whether the request may be evicted for an admission, if ``num_promised`` host blocks are taken already."""
        if self._mode is SwapMode.RECOMPUTE:
            return True
        if self._memory.num_copied(request) + num_promised <= self._memory.num_host_blocks_left:
            return True
        almost_nothing_s = self._times.prefill_s(1) + self._times.min_iteration_s
        return self._recompute_s(request) <= max(almost_nothing_s, self._both_ways_s(request))

    def yields(self, request: Request) -> bool:
        """Whether the request, which is not on the device, leaves the host's memory to requests before it."""
        decodes_s = request.num_output * self._times.decode_s(1, request.num_tokens)
        return self._times.prefill_s(request.num_tokens) <= _LITTLE * decodes_s

    def evict(self, request: Request) -> None:
        """Swap a request out, or drop its KV if the host is full or computing it again is cheaper."""
        if self.copies(request) and self._memory.swap_out(request):
            self.num_preemptions += 1
            self.notes.append((request.request_id, "preempted and swapped out"))
        else:
            self.drop(request)

    def copies(self, request: Request) -> bool:
        """Whether an evicted request is swapped out, if the host has room, rather than computed again."""
        return self._mode is not SwapMode.RECOMPUTE and self._recompute_s(request) > self._both_ways_s(request)

    def _recompute_s(self, request: Request) -> float:
        return self._times.prefill_s(request.num_fed)

    def _both_ways_s(self, request: Request) -> float:
        return 2.0 * self._times.swap_s(self._memory.swap_bytes(request))

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks, which are free. It stays for as long as recomputing its KV takes."""
        self._memory.start(request)
        self.notes.append((request.request_id, "admitted"))
        recompute_s = self._times.prefill_s(request.num_uncomputed) if request.has_decoded else 0.0
        request.owed_s = max(recompute_s, self._times.min_iteration_s)

    def bring_back(self, request: Request, *, is_due: bool) -> None:
        """Begin to swap in a request whose blocks are free. If it is not due yet, it may be evicted before it runs."""
        both_ways_s = 2.0 * self._times.swap_s(self._memory.device_bytes)
        self._memory.swap_in(request)
        self.notes.append((request.request_id, "swapped in"))
        request.owed_s = max(both_ways_s, self._times.min_iteration_s) if is_due else 0.0

    def on_token(self, request: Request, service_s: float) -> None:
        """A request got a token, and was served for ``service_s``."""
        if request.owed_s > 0.0:
            request.owed_s -= max(service_s, self._times.min_iteration_s)

    def drop(self, request: Request) -> None:
        """Drop a request's KV, wherever it lies, so that it is computed again."""
        self.num_preemptions += 1
        self.notes.append((request.request_id, "preempted, its KV was dropped"))
        request.num_charged = max(request.num_charged, request.num_fed)
        self._memory.drop(request)


class BlockBudget:
    """Counts blocks that are free now or soon, while one iteration is planned. Promised blocks no longer count."""

    def __init__(self, memory: KVMemory, swapper: Swapper, ranking: Sequence[Request]) -> None:
        """``ranking``: all requests, the smallest ENST first. Requests are evicted from its end."""
        self._memory = memory
        self._swapper = swapper
        self._ranking = ranking
        self._last = len(ranking) - 1  # no request behind it is on the device
        self._num_promised = 0
        self._found_yielding: deque[tuple[int, Request]] | None = None  # looked for when the host is full

    def make(self, num_blocks: int, ahead_of: int, spare: int = 0, *, may_drop: bool = False) -> bool:
        """Promise ``num_blocks`` blocks, with ``spare`` more left free. May evict requests ranked behind ``ahead_of``;
        if it ``may_drop``, also those that ``Swapper.may_evict`` refuses.

        False, with nothing done, if that does not suffice.
        """
        num_missing = num_blocks + spare - self._num_coming
        if num_missing > 0:
            victims = self._victims(num_missing, ahead_of, may_drop=may_drop)
            if not victims:
                return False
            for victim in victims:
                if self._swapper.copies(victim):
                    self._free_host(self._memory.num_copied(victim))
                self._swapper.evict(victim)
        self._num_promised += num_blocks
        return True

    def _victims(self, num_missing: int, ahead_of: int, *, may_drop: bool) -> list[Request]:
        """Requests behind ``ahead_of`` that have so many blocks to give up, those ranked last first. Those whose KV
        would be lost come after all others, the shortest first. Nothing, if these do not suffice.
        """
        memory, ranking = self._memory, self._ranking
        while self._last > ahead_of and not ranking[self._last].is_resident:
            self._last -= 1
        victims: list[Request] = []
        dear: list[Request] = []
        num_promised = 0  # of the host
        for index in range(self._last, ahead_of, -1):
            request = ranking[index]
            if not request.is_resident or request.owed_s > 0.0:
                continue
            if not self._may_evict(index, num_promised):
                dear.append(request)
                continue
            victims.append(request)
            num_promised += memory.num_copied(request)
            num_missing -= memory.num_given_up(request)
            if num_missing <= 0:
                return victims
        for request in sorted(dear, key=lambda request: request.num_fed) if may_drop else ():
            victims.append(request)
            num_missing -= memory.num_given_up(request)
            if num_missing <= 0:
                return victims
        return []

    def _may_evict(self, index: int, num_promised: int) -> bool:
        """Whether the request with this rank may be evicted for an admission, because its KV can be copied, also where
        requests behind it have theirs, or is computed again for almost nothing.
        """
        request = self._ranking[index]
        if self._swapper.may_evict(request, num_promised):
            return True
        num_missing = self._memory.num_copied(request) + num_promised - self._memory.num_host_blocks_left
        for rank, yielding in self._yielding():
            if rank <= index:
                break
            num_missing -= len(self._memory.rows.held(yielding.host_blocks))
            if num_missing <= 0:
                return True
        return False

    def _yielding(self) -> deque[tuple[int, Request]]:
        """The swapped requests that give up their KV, with their ranks, the last first."""
        if self._found_yielding is None:
            yields = self._swapper.yields
            ranked = [*enumerate(self._ranking)]
            self._found_yielding = deque(
                [(rank, one) for rank, one in reversed(ranked) if one.is_swapped and yields(one)]
            )
        return self._found_yielding

    def _free_host(self, num_blocks: int) -> None:
        """Free as many of the host's blocks, as far as requests yield them."""
        while self._memory.num_host_blocks_left < num_blocks and self._yielding():
            self._swapper.drop(self._yielding().popleft()[1])

    def promise(self, num_blocks: int) -> None:
        """Set ``num_blocks`` blocks aside, even if fewer are free."""
        self._num_promised += num_blocks

    def hand_out(self, num_blocks: int) -> None:
        """Promised blocks were taken."""
        self._num_promised -= num_blocks

    @property
    def _num_coming(self) -> int:
        return self._memory.device.num_free_blocks + self._memory.num_freeing_blocks - self._num_promised
