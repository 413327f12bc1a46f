"""Admission: which requests get device blocks for the next iteration, the most urgent first.

Requests on the device grow by a block when their tokens need it. Waiting requests are admitted, and swapped requests
are brought back, as far as blocks are free or soon will be. Under proactive swapping (FastServe, section 4.2) requests
are ranked by their estimated next scheduling time, ENST, and those ranked last give up their blocks.

A request that does not fit is passed by requests behind it that do, so that memory does not lie idle. Once these have
got as many blocks as the first one wants, it is passed no more, so that a large request does not starve.
"""

from collections.abc import Sequence
from operator import itemgetter

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.swapping import BlockBudget, SwapMode, Swapper


class Admission:
    """Hands out the device blocks of one instance.

    ``max_tokens`` is the length of the longest request that can be served.
    """

    def __init__(
        self,
        memory: KVMemory,
        policy: SchedulingPolicy,
        swapper: Swapper,
        mode: SwapMode,
        *,
        max_batch_requests: int,
        max_batch_tokens: int,
        max_tokens: int,
    ) -> None:
        self._memory = memory
        self._policy = policy
        self._swapper = swapper
        self._mode = mode
        self._max_batch_requests = max_batch_requests
        self._max_batch_tokens = max_batch_tokens
        self._max_tokens = max_tokens

    def make_room(self, order: Sequence[Request], now: float, *, may_swap: bool) -> set[Request]:
        """Find blocks for due requests to grow, start or be swapped in. Returns waiting requests that may start now.

        With ``may_swap`` this may evict less urgent requests. Otherwise it uses only blocks that are free.
        """
        memory, max_requests = self._memory, self._max_batch_requests
        ranking = self._ranking(order, now)
        budget = BlockBudget(memory, self._swapper, ranking)
        self._grow(order, ranking, budget, may_swap=may_swap)
        reserves_output = self._policy.reserves_output
        if reserves_output:
            budget.promise(sum(self._num_final_blocks(r) - memory.num_held(r) for r in ranking if r.blocks))
        passed: list[Request] = []  # they do not fit
        admitted: set[Request] = set()
        num_admitted_tokens = 0
        num_admitted_blocks = 0  # still free, because admitted requests take their blocks only when they start
        num_ahead = 0
        for rank, request in enumerate(ranking):
            num_ahead += request.is_resident
            if request.blocks or (request.is_swapped and not may_swap):
                continue
            if self._mode is SwapMode.REACTIVE and rank >= max_requests:
                break
            num_wanted = self._num_final_blocks(request) if reserves_output else memory.blocks_wanted(request)
            # One row stays free for each request ahead. Otherwise their next growth would preempt this one again.
            spare = 0 if reserves_output else num_ahead * memory.rows.num_groups
            # A request that is not due for the next iteration gets blocks ahead of need, so it evicts no other request.
            ahead_of = rank if may_swap and rank < max_requests else len(ranking)
            if not budget.make(num_wanted, ahead_of, spare):
                if rank >= max_requests or not self._may_be_passed(request, num_wanted):
                    break
                passed.append(request)
                continue
            num_ahead += 1
            if num_wanted + num_admitted_blocks > memory.device.num_free_blocks:
                continue  # its blocks are promised to it, and will soon be free
            if request.is_swapped:
                # Check again, because making room may have evicted cached blocks that it would have shared.
                if memory.blocks_wanted(request) + num_admitted_blocks <= memory.device.num_free_blocks:
                    _pass(passed, request, num_wanted)
                    self._swapper.bring_back(request, is_due=rank < max_requests)
                    budget.hand_out(num_wanted)
                continue
            admitted.add(request)
            _pass(passed, request, num_wanted)
            num_admitted_blocks += num_wanted
            num_admitted_tokens += request.num_uncomputed
            if num_admitted_tokens >= 2 * self._max_batch_tokens:
                break  # more than the next iterations can prefill
        return admitted

    def _may_be_passed(self, request: Request, num_wanted: int) -> bool:
        """Whether requests behind this one, which wants ``num_wanted`` blocks, may get blocks before it does."""
        return self._policy.is_preemptive and request.num_passing_blocks < num_wanted

    def _grow(
        self, order: Sequence[Request], ranking: Sequence[Request], budget: BlockBudget, *, may_swap: bool
    ) -> None:
        """Give each due request on the device blocks for its newest token."""
        rank_of = {} if ranking is order else {request: rank for rank, request in enumerate(ranking)}
        num_due = 0
        for index, request in enumerate(order):
            if not request.is_resident:
                continue
            num_due += 1
            if num_due > self._max_batch_requests:
                return
            if self._memory.has_blocks(request):
                continue
            ahead_of = rank_of.get(request, index) if may_swap else len(ranking)
            num_missing = self._memory.num_missing(request)
            if budget.make(num_missing, ahead_of, may_drop=True) and self._memory.grow(request):
                budget.hand_out(num_missing)

    def _ranking(self, order: Sequence[Request], now: float) -> Sequence[Request]:
        """The requests by ENST if some are swapped or not all fit into memory; otherwise in the policy's order."""
        if self._mode is not SwapMode.PROACTIVE or self._has_room_for_all(order):
            return order
        starts_s = self._policy.next_starts_s(order, now, self._max_batch_requests)
        return [request for request, _ in sorted(zip(order, starts_s, strict=True), key=itemgetter(1))]

    def _has_room_for_all(self, order: Sequence[Request]) -> bool:
        num_free = self._memory.device.num_free_blocks - len(order) * self._memory.rows.num_groups
        for request in order:
            if request.host_blocks:
                return False
            if not request.blocks:
                num_free -= self._memory.blocks_of(request)
            if num_free < 0:
                return False
        return True

    def _num_final_blocks(self, request: Request) -> int:
        """The blocks that the request needs with its whole output."""
        num_tokens = min(request.num_prompt + request.sampling.max_tokens, self._max_tokens)
        return self._memory.blocks_for(num_tokens)


def _pass(passed: Sequence[Request], request: Request, num_blocks: int) -> None:
    """``request`` gets its blocks before the requests that it passes."""
    for other in passed:
        other.num_passing_blocks += num_blocks
    request.num_passing_blocks = 0
