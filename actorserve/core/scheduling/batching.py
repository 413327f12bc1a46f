"""Which requests make up the next iteration.

FastServe's iteration-level preemption: the batch is the front of the policy's order, chosen anew for each iteration, up
to ``max_batch_requests``. A request outside the batch keeps its KV until a more urgent request needs the blocks
(``core.scheduling.admission``). Decodes take one token each, and prefills share what ``core.scheduling.token_budget``
leaves; for baselines ``core.scheduling.whole_prompts`` cuts no prompt. If a request cannot run now because its KV is on
the host, the requests behind it may run first.
"""

from collections.abc import Collection, Iterable, Sequence

from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.request import Request
from actorserve.core.scheduling.admission import Admission
from actorserve.core.scheduling.batch import Batch
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.swapping import SwapMode, Swapper
from actorserve.core.scheduling.token_budget import TokenBudget
from actorserve.core.scheduling.whole_prompts import LeftOut
from actorserve.core.timing.step_times import StepTimes


class Batcher:
    """Plans iterations, begins swaps, and measures how long due requests waited for these copies."""

    def __init__(
        self,
        memory: KVMemory,
        policy: SchedulingPolicy,
        times: StepTimes,
        token_budget: TokenBudget,
        *,
        mode: SwapMode,
        max_batch_requests: int,
        max_batch_tokens: int,
        max_tokens: int,
        max_decode_wait_s: float,
    ) -> None:
        """``max_tokens`` is the length of the longest request that can be served. A decode that prompts have kept out
        of the batch for ``max_decode_wait_s`` goes before them.
        """
        self._memory = memory
        self._policy = policy
        self._token_budget = token_budget
        self._mode = mode
        self._max_batch_requests = max_batch_requests
        self._max_rows = min(max_batch_requests, max_batch_tokens)
        self._swapper = Swapper(memory, times, mode)
        self._admission = Admission(
            memory,
            policy,
            self._swapper,
            mode,
            max_batch_requests=max_batch_requests,
            max_batch_tokens=max_batch_tokens,
            max_tokens=max_tokens,
        )
        self._left_out = LeftOut(max_decode_wait_s)
        self._has_waited_for_copies = False
        self._blocked_since_s = 0.0
        self._num_blocked = 0
        self.blocked_s = 0.0
        self.order: Sequence[Request] = ()
        """All requests in the order of the last planning. (Between two plannings the policy would count the requests
        of the running iteration as waiting.)"""

    @property
    def num_preemptions(self) -> int:
        return self._swapper.num_preemptions

    def num_yielding_blocks(self, requests: Iterable[Request]) -> int:
        """How many blocks those of ``requests`` hold or want that leave memory to a new request if need be."""
        if not self._policy.is_preemptive or not self._memory.host.num_blocks:
            return 0
        preempted = [request for request in requests if request.num_output and not request.blocks]
        return sum([self._memory.blocks_of(request) for request in preempted if self._swapper.yields(request)])

    def take_notes(self) -> list[tuple[str, str]]:
        """(request id, what happened to its KV) since the last call."""
        notes = self._swapper.notes
        if notes:
            self._swapper.notes = []
        return notes

    def on_token(self, request: Request, service_s: float) -> None:
        """A request got a token, and was served for ``service_s``."""
        self._swapper.on_token(request, service_s)

    def plan(
        self, now: float, held: Collection[Request] = (), *, is_ahead: bool = False
    ) -> tuple[Batch, list[Request]]:
        """The next iteration, and the requests that must look for another instance.

        The iteration has no rows if nothing can run before a copy is done or a request comes. The KV of the returned
        requests does not fit into the memory that is usable now. Requests that are ``held`` are not planned, and keep
        their KV. ``is_ahead``: an iteration is in flight. Its end frees blocks, so no request is given up before.
        """
        self._count_blocked(now)
        order = self._policy.order(now)
        if held:
            order = [request for request in order if request not in held]
        refused: list[Request] = []
        while True:
            if not is_ahead and (too_large := self._too_large_now(order)):
                refused += too_large
                order = [request for request in order if request not in too_large]
            num_preemptions, had_waited = self._swapper.num_preemptions, self._has_waited_for_copies
            batch = self._plan(order, now)
            if batch.rows or self._memory.is_copying or is_ahead:
                break
            if had_waited or self._swapper.num_preemptions > num_preemptions:
                continue  # the next attempt may evict, or the evicted blocks may suffice for another request
            stuck = next((request for request in reversed(order) if request.is_resident), None)
            if stuck is None:
                break
            self._swapper.drop(stuck)  # every request waits for room, so the least urgent one gives up its blocks
        self._num_blocked = self._num_due_in_copy(order)
        self.order = order
        return batch, refused

    def rest(self, now: float) -> None:
        """No request is left to plan."""
        self._count_blocked(now)
        self._num_blocked = 0
        self.order = ()

    def quiet_batch(self, order: Sequence[Request], num_context_tokens: int, now: float) -> Batch:
        """What ``plan`` gives if all requests, in this order, decode in one batch and have their blocks."""
        self._blocked_since_s = now
        self.order = order
        self._left_out.note((), now)
        budget = self._token_budget.begin(len(order), num_context_tokens)
        return Batch([(request, 1) for request in order], budget)

    def _plan(self, order: Sequence[Request], now: float) -> Batch:
        # Once an iteration has waited for copies, the requests that were copied run before any other copy begins.
        admitted = self._admission.make_room(order, now, may_swap=not self._has_waited_for_copies)
        if self._mode is SwapMode.REACTIVE:
            self._has_waited_for_copies = self._memory.is_copying
            if self._memory.is_copying:
                return Batch([], None)
        return self._fill(order, admitted, now)

    def _too_large_now(self, order: Sequence[Request]) -> list[Request]:
        """The requests without device blocks that would not fit even alone, because memory is short now."""
        num_usable = self._memory.device.num_usable_blocks
        if num_usable == self._memory.device.num_blocks:
            return []
        return [request for request in order if not request.blocks and self._memory.blocks_of(request) > num_usable]

    def _fill(self, order: Sequence[Request], admitted: set[Request], now: float) -> Batch:
        """The batch of the requests that can run, from the front of the order."""
        memory = self._memory
        runnable = [
            request for request in order if request in admitted or (request.is_resident and memory.has_blocks(request))
        ]
        due = runnable[: self._max_rows]
        decodes = [request for request in due if request.num_uncomputed == 1 and request not in admitted]
        overdue = self._left_out.overdue(decodes, now)
        budget = self._token_budget.begin(len(decodes), _num_context_tokens(decodes), len(overdue))
        rows: list[tuple[Request, int]] = []
        decodes = []
        is_full = False  # of prefills
        for request in runnable:
            if len(rows) == self._max_rows:
                break
            if request.num_uncomputed == 1 and request not in admitted:
                rows.append((request, 1))
                decodes.append(request)
            elif not is_full:
                if not budget.has_room_for(request.num_uncomputed):
                    is_full = True
                    continue
                if request in admitted:
                    if memory.blocks_wanted(request) > memory.device.num_free_blocks:
                        continue  # blocks that it would have shared were evicted meanwhile
                    self._swapper.admit(request)
                rows.append((request, budget.take(request.num_uncomputed, request.num_fed)))
        left_out: set[Request] = set()
        if budget.max_decodes is not None and len(decodes) > budget.max_decodes:
            if overdue:
                decodes.sort(key=lambda request: request not in overdue)
            left_out = set(decodes[budget.max_decodes :])
            rows = [row for row in rows if row[0] not in left_out]
            del decodes[budget.max_decodes :]
        self._left_out.note(left_out, now)
        if len(decodes) != budget.iteration.num_decodes:
            # Prefills that got no tokens left their rows to decodes behind them.
            budget.iteration.set_decodes(len(decodes), _num_context_tokens(decodes))
        return Batch(rows, budget)

    # --- how long due requests waited for copies ---------------------------------------------------------------------

    def _count_blocked(self, now: float) -> None:
        self.blocked_s += self._num_blocked * (now - self._blocked_since_s)
        self._blocked_since_s = now

    def _num_due_in_copy(self, order: Sequence[Request]) -> int:
        if not self._memory.is_copying:
            return 0
        due = order[: self._max_batch_requests]
        if self._mode is SwapMode.REACTIVE:
            # The iteration waits for the copies, and so do all its requests.
            return sum(request.is_started for request in due)
        return sum(request.copy_id is not None for request in due)


def _num_context_tokens(decodes: Sequence[Request]) -> int:
    """The tokens that these decodes attend to together."""
    return sum(request.num_tokens for request in decodes)
