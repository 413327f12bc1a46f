"""Which requests make up the next iteration, and what moves between device and host meanwhile.

FastServe's iteration-level preemption: the batch is the front of the policy's order, chosen anew for each iteration,
up to ``max_batch_requests``. Who is not in it keeps its KV where it is, until somebody more urgent needs the room.
Decodes take one token each, prefills share what ``core.scheduling.token_budget`` leaves beside them; a request that
cannot run now, because its KV is on the host, lets those behind it pass.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from actorserve.core.effects import Effect
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import StepPlan
from actorserve.core.request import Request
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.swapping import ArrivalReserve, BlockBudget, SwapMode, Swapper
from actorserve.core.scheduling.token_budget import IterationBudget, TokenBudget
from actorserve.core.timing.step_times import StepTimes

_RESERVE_SHARE = 8  # the most that is kept free for newcomers: this part of the pool
_RESERVE_WINDOW_S = 0.3


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration: its rows (request, tokens fed), and what it was planned to take."""

    rows: list[tuple[Request, int]]
    budget: IterationBudget | None

    @property
    def num_decodes(self) -> int:
        return self.budget.iteration.num_decodes if self.budget is not None else 0

    def step_plan(self, step_id: int) -> StepPlan:
        """What the engine is told of it."""
        rows = self.rows
        return StepPlan(
            step_id=step_id,
            request_ids=tuple(request.request_id for request, _ in rows),
            starts=tuple(request.num_computed for request, _ in rows),
            token_ids=tuple(
                tuple(request.token_ids[request.num_computed : request.num_computed + n]) for request, n in rows
            ),
            block_tables=tuple(tuple(request.blocks) for request, _ in rows),
            samples=tuple(n == request.num_uncomputed for request, n in rows),
        )


class Batcher:
    """Plans iterations; asks for copies; counts how long requests that were due waited for these."""

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
    ) -> None:
        """``max_tokens``: of the largest request that can be served."""
        self._memory = memory
        self._policy = policy
        self._token_budget = token_budget
        self._mode = mode
        self._max_batch_requests = max_batch_requests
        self._max_rows = min(max_batch_requests, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._max_tokens = max_tokens
        self._mover = Swapper(memory, times, mode)
        self._reserve = ArrivalReserve(_RESERVE_WINDOW_S)
        self._has_waited_for_copies = False
        self._blocked_since_s = 0.0
        self._num_blocked = 0
        self.blocked_s = 0.0
        self.order: Sequence[Request] = ()
        """All requests in the order of the last planning. (To ask the policy in between would take those of the
        iteration that is under way for waiting.)"""

    @property
    def num_preemptions(self) -> int:
        return self._mover.num_preemptions

    def on_arrival(self, request: Request, now: float) -> None:
        self._reserve.on_arrival(self._memory.blocks_of(request), now)

    def on_token(self, request: Request, service_s: float) -> None:
        """A request got a token, for so much service."""
        self._mover.on_token(request, service_s)

    def plan(self, now: float, effects: list[Effect], paused: Collection[Request] = ()) -> tuple[Batch, list[Request]]:
        """The next iteration; without rows where nothing can run before a copy is done, or something comes.

        And the requests whose KV does not fit into the memory that is usable now: they must look for another place.
        Those that stand still are left alone, with what they hold.
        """
        self._count_blocked(now)
        order = self._policy.order(now)
        if paused:
            order = [request for request in order if request not in paused]
        refused: list[Request] = []
        while True:
            if too_large := self._too_large_now(order):
                refused += too_large
                order = [request for request in order if request not in too_large]
            num_preemptions, had_waited = self._mover.num_preemptions, self._has_waited_for_copies
            batch = self._plan(order, now, effects)
            if batch.rows or self._memory.is_copying:
                break
            if had_waited or self._mover.num_preemptions > num_preemptions:
                continue  # room may be made now, or was made and may do for another
            stuck = next((request for request in reversed(order) if request.is_resident), None)
            if stuck is None:
                break
            self._mover.drop(stuck)  # everybody waits for room that nobody gives: the least urgent does
        self._num_blocked = self._num_due_in_copy(order)
        self.order = order
        return batch, refused

    def rest(self, now: float) -> None:
        """Nobody is left to plan for."""
        self._count_blocked(now)
        self._num_blocked = 0
        self.order = ()

    def _plan(self, order: Sequence[Request], now: float, effects: list[Effect]) -> Batch:
        # What the copies that an iteration waited for were made for runs first, before anything is copied again.
        admitted = self._make_room(order, now, effects, may_move=not self._has_waited_for_copies)
        if self._mode is SwapMode.REACTIVE:
            self._has_waited_for_copies = self._memory.is_copying
            if self._memory.is_copying:
                return Batch([], None)
        return self._rows(order, admitted)

    def plan_quiet(self, now: float) -> Batch:
        """The next iteration of a batch of decodes that holds all requests, and whose blocks are free: as ``plan``."""
        self._blocked_since_s = now
        self.order = order = self._policy.order(now)
        for request in order:
            if not self._memory.grow(request):
                raise ValueError("a quiet step has no block")
        budget = self._token_budget.begin(len(order), _num_context_tokens(order))
        return Batch([(request, 1) for request in order], budget)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _too_large_now(self, order: Sequence[Request]) -> list[Request]:
        """Those not on the device that would not fit there even if all others left, because memory is short now."""
        num_usable = self._memory.device.num_usable_blocks
        if num_usable == self._memory.device.num_blocks:
            return []
        return [request for request in order if not request.blocks and self._memory.blocks_of(request) > num_usable]

    def _make_room(
        self, order: Sequence[Request], now: float, effects: list[Effect], *, may_move: bool
    ) -> set[Request]:
        """Let those that are due grow, start or come back, the most urgent first. Those that wait and may start now.

        With ``may_move`` at the cost of others, else as far as room is free.
        """
        memory, most = self._memory, self._max_batch_requests
        ranking = self._ranking(order, now)
        room = BlockBudget(memory, self._mover, ranking, effects)
        self._grow(order, ranking, room, may_move=may_move)
        reserving = self._policy.reserves_output
        if reserving:
            room.promise(sum(self._num_final_blocks(each) - len(each.blocks) for each in ranking if each.blocks))
        reserve = self._num_reserved_blocks(now)
        admitted: set[Request] = set()
        num_admitted_tokens = 0
        num_taken = 0  # by those admitted: they start as far as the token budget goes
        num_ahead = 0
        for rank, request in enumerate(ranking):
            num_ahead += request.is_resident
            if request.blocks or (request.is_swapped and not may_move):
                continue
            if self._mode is SwapMode.REACTIVE and rank >= most:
                break
            num_wanted = self._num_final_blocks(request) if reserving else memory.blocks_wanted(request)
            # Beside what it takes, one block for each before it: else the very next growth would preempt it again.
            spare = 0 if reserving else num_ahead
            if request.is_swapped and num_ahead:
                spare += reserve
            # Who is not due for the next iteration comes ahead of need, and takes only what is free.
            ahead_of = rank if may_move and rank < most else len(ranking)
            if not room.make(num_wanted, ahead_of, spare):
                break
            num_ahead += 1
            if num_wanted + num_taken > memory.device.num_free_blocks:
                continue  # promised, and soon free
            if request.is_swapped:
                # Asked again: blocks that it would have shared may have been given up to make this very room.
                if memory.blocks_wanted(request) + num_taken <= memory.device.num_free_blocks:
                    self._mover.bring_back(request, effects, is_due=rank < most)
                    room.keep(num_wanted)
                continue
            admitted.add(request)
            num_taken += num_wanted
            num_admitted_tokens += request.num_uncomputed
            if num_admitted_tokens >= 2 * self._max_batch_tokens:
                break  # more than the next iterations can prefill
        if reserve:
            room.make(0, ahead_of=most - 1, spare=reserve)
        return admitted

    def _grow(self, order: Sequence[Request], ranking: Sequence[Request], room: BlockBudget, *, may_move: bool) -> None:
        """Let those that are due have a block for their newest token."""
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
            ahead_of = rank_of.get(request, index) if may_move else len(ranking)
            if room.make(1, ahead_of) and self._memory.grow(request):
                room.keep(1)

    def _ranking(self, order: Sequence[Request], now: float) -> Sequence[Request]:
        """By ENST, where it matters: where somebody is swapped, or not all fit."""
        if self._mode is not SwapMode.PROACTIVE or self._has_room_for_all(order):
            return order
        starts_s = self._policy.next_starts_s(order, now, self._max_batch_requests)
        return [request for request, _ in sorted(zip(order, starts_s, strict=True), key=itemgetter(1))]

    def _has_room_for_all(self, order: Sequence[Request]) -> bool:
        num_free = self._memory.device.num_free_blocks - len(order)
        for request in order:
            if request.host_blocks:
                return False
            if not request.blocks:
                num_free -= self._memory.blocks_of(request)
            if num_free < 0:
                return False
        return True

    def _num_final_blocks(self, request: Request) -> int:
        num_tokens = min(request.num_prompt + request.sampling.max_tokens, self._max_tokens)
        return self._memory.blocks_for(num_tokens)

    def _num_reserved_blocks(self, now: float) -> int:
        if self._mode is not SwapMode.PROACTIVE or not self._policy.is_preemptive:
            return 0
        return min(self._reserve.num_blocks(now), self._memory.device.num_usable_blocks // _RESERVE_SHARE)

    # --- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, order: Sequence[Request], admitted: set[Request]) -> Batch:
        memory = self._memory
        runnable = [
            request
            for request in order
            if request in admitted
            or (request.is_resident and (request.num_uncomputed > 1 or memory.has_blocks(request)))
        ]
        due = runnable[: self._max_rows]
        decodes = [request for request in due if request.num_uncomputed == 1 and request not in admitted]
        budget = self._token_budget.begin(len(decodes), _num_context_tokens(decodes))
        rows: list[tuple[Request, int]] = []
        decodes = []
        for request in runnable:
            if len(rows) == self._max_rows:
                break
            if request.num_uncomputed == 1 and request not in admitted:
                rows.append((request, 1))
                decodes.append(request)
            elif not budget.is_spent:
                if request in admitted:
                    if memory.blocks_wanted(request) > memory.device.num_free_blocks:
                        continue  # blocks that it would have shared were given up meanwhile
                    self._mover.admit(request)
                rows.append((request, budget.take(request.num_uncomputed, request.num_computed)))
        if (
            len(decodes) != budget.iteration.num_decodes
        ):  # some had no token, and left their rows to decodes behind them
            budget.iteration.set_decodes(len(decodes), _num_context_tokens(decodes))
        return Batch(rows, budget)

    # --- how long requests that were due waited for copies -----------------------------------------------------------

    def _count_blocked(self, now: float) -> None:
        self.blocked_s += self._num_blocked * (now - self._blocked_since_s)
        self._blocked_since_s = now

    def _num_due_in_copy(self, order: Sequence[Request]) -> int:
        if not self._memory.is_copying:
            return 0
        due = order[: self._max_batch_requests]
        if self._mode is SwapMode.REACTIVE:
            return sum(request.is_started for request in due)  # the iteration waits for the copies, and all with it
        return sum(request.copy_id is not None for request in due)


def _num_context_tokens(decodes: Sequence[Request]) -> int:
    """What they attend to in all."""
    return sum(len(request.token_ids) for request in decodes)
