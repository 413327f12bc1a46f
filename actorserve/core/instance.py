"""One instance's scheduler: the life of each request on it, and what its engine does next.

A request that comes is queued by the policy (``core.mlfq``); ``core.batching`` chooses each iteration's requests anew,
and moves KV between device and host (``core.swapping``). Blocks that an iteration filled are shared with requests that
begin with the same tokens, and outlive their owner until their place is needed. One iteration is in flight at a time,
and copies go beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from actorserve.core.batching import Batch, Batcher
from actorserve.core.effects import AddToEngine, Drained, DropFromEngine, Effect, RunStep, Send
from actorserve.core.freeness import virtual_usage_bytes
from actorserve.core.kv_memory import KVMemory
from actorserve.core.messages import (
    LOCAL,
    CopyDone,
    Drain,
    Finished,
    LoadReport,
    MemoryLimit,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Role,
    Start,
    Started,
    StepDone,
    StepPlan,
    Tick,
)
from actorserve.core.outputs import Row, send_tokens
from actorserve.core.policy import SchedulingPolicy
from actorserve.core.request import Request
from actorserve.core.step_times import StepTimes
from actorserve.core.swapping import SwapMode
from actorserve.core.token_budget import TokenBudget


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """The sizes of an instance, told by its engine and settings. ``headroom_bytes`` is by priority."""

    num_blocks: int
    tokens_per_block: int
    bytes_per_block: int
    max_context_tokens: int
    max_batch_requests: int
    max_batch_tokens: int
    load_report_s: float
    retry_s: float
    tpot_target_s: float = math.inf
    headroom_bytes: dict[int, int] = field(default_factory=dict)
    prefix_cache: bool = True
    num_host_blocks: int = 0
    swap_mode: SwapMode = SwapMode.PROACTIVE

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that can be served."""
        return min(self.max_context_tokens, self.num_blocks * self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class _Step:
    """The iteration in flight."""

    step_id: int
    batch: Batch
    starts: list[int]  # of each row: the tokens computed before


class InstanceState:
    """The pure state machine of one instance. ``handle`` never blocks and never fails on what a peer sends."""

    def __init__(self, config: InstanceConfig, policy: SchedulingPolicy, times: StepTimes) -> None:
        """``times`` are the policy's, too."""
        self.config = config
        self.policy = policy
        self.times = times
        self.memory = KVMemory(
            config.num_blocks,
            config.num_host_blocks,
            config.tokens_per_block,
            config.bytes_per_block,
            prefix_cache=config.prefix_cache,
        )
        self.token_budget = TokenBudget(config.tpot_target_s, config.max_batch_tokens, times)
        self.batcher = Batcher(
            self.memory,
            policy,
            times,
            self.token_budget,
            mode=config.swap_mode,
            max_batch_requests=config.max_batch_requests,
            max_batch_tokens=config.max_batch_tokens,
            max_tokens=config.max_tokens,
        )
        self.requests: dict[str, Request] = {}  # waiting or started
        self.ended: dict[str, Request] = {}  # finished or given back, until their gateway releases them
        self.num_stale_messages = 0
        self.draining = False
        self._said_drained = False
        self._listeners: dict[str, Peer] = {}
        self._step: _Step | None = None
        self._num_steps = 0
        self._report_sequence = 0
        self._accepted: list[str] = []
        self._next_report_s: float | None = None
        self._next_retry_s: float | None = None

    # --- the shell's two calls ---------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local ones have no sender), and return what is to be done, in order."""
        sender = sender or LOCAL
        effects: list[Effect] = []
        match message:
            case Start():
                self._on_start(message, sender, now, effects)
            case StepDone():
                self._on_step_done(message, now, effects)
            case Release():
                self._on_release(message, effects)
            case Resend():
                self._on_resend(message, effects)
            case PeerUp(peer=peer, role=Role.GATEWAY | Role.COORDINATOR):
                self._listeners[peer.name] = peer
                effects.append(Send(peer, self._load_report(())))
                if self._next_report_s is None:
                    self._next_report_s = now + self.config.load_report_s
            case PeerDown(peer=peer):
                self._on_peer_down(peer, effects)
            case Tick():
                self._on_tick(now, effects)
            case CopyDone(copy_id=copy_id, duration_s=duration_s):
                self.times.observe_swap(self.memory.on_copy_done(copy_id), duration_s)
            case MemoryLimit(num_blocks=num_blocks):
                self.memory.device.limit(num_blocks)
            case Drain():
                self.draining = True
                self._report_load(now, effects)
            case _:
                self.num_stale_messages += 1
        self._run_next_step(now, effects)
        if self.draining and not self._said_drained and not self.requests and not self.ended:
            self._said_drained = True
            effects.append(Drained())
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return min((t for t in (self._next_report_s, self._next_retry_s) if t is not None), default=None)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_start(self, message: Start, gateway: Peer, now: float, effects: list[Effect]) -> None:
        spec, epoch = message.request, message.epoch
        present = self.requests.get(spec.request_id) or self.ended.get(spec.request_id)
        if present is not None and present.epoch >= epoch:
            if present.epoch == epoch:
                effects.append(Send(gateway, Started(spec.request_id, epoch)))
                if spec.request_id in self.ended:
                    effects.append(self._last_word(present))
            else:
                self.num_stale_messages += 1
            return
        if present is not None:
            self._remove(present, effects)
        request = Request(spec, epoch, gateway)
        refusal = self._refusal(request)
        if refusal is not None:
            effects.append(Send(gateway, Refused(spec.request_id, epoch, refusal, retry_after_s=self.config.retry_s)))
            return
        self._accepted.append(spec.request_id)
        effects.append(Send(gateway, Started(spec.request_id, epoch)))
        if request.check_finished(self.config.max_tokens):
            # Its last owner died between the last token and saying so.
            self._end(request, now, effects)
            return
        self.requests[spec.request_id] = request
        self.policy.add(request, now, self.memory.prefixes.num_cached_tokens(request), message.attained)
        self.batcher.on_arrival(request, now)
        effects.append(AddToEngine(spec))

    def _refusal(self, request: Request) -> RefusalReason | None:
        if self.draining:
            return RefusalReason.DRAINING
        if not request.spec.prompt_token_ids or len(request.token_ids) > self.config.max_tokens:
            return RefusalReason.TOO_LARGE
        return None

    def _on_release(self, message: Release, effects: list[Effect]) -> None:
        request = self.requests.get(message.request_id) or self.ended.get(message.request_id)
        if request is not None and request.epoch <= message.epoch:
            self._remove(request, effects)

    def _on_peer_down(self, peer: Peer, effects: list[Effect]) -> None:
        if self._listeners.get(peer.name) == peer:
            del self._listeners[peer.name]
        for request in [*self.requests.values(), *self.ended.values()]:
            if request.gateway == peer:
                self._remove(request, effects)

    def _on_resend(self, message: Resend, effects: list[Effect]) -> None:
        request = self.requests.get(message.request_id) or self.ended.get(message.request_id)
        if request is None or request.epoch != message.epoch:
            self.num_stale_messages += 1
            return
        first = max(message.from_position, request.resumed_output)
        send_tokens(((request, position) for position in range(first, request.num_output)), effects)
        if message.request_id in self.ended:
            effects.append(self._last_word(request))

    def _remove(self, request: Request, effects: list[Effect]) -> None:
        """Forget a request, in whatever state it is.

        Its blocks are free at once, but for those that a copy under way reads or writes; also under an iteration that
        still writes them: blocks are handed out only when the next one is planned, and that is after this one is done.
        """
        if self.ended.get(request.request_id) is request:
            del self.ended[request.request_id]
            return
        del self.requests[request.request_id]
        self._leave(request, effects)

    def _leave(self, request: Request, effects: list[Effect]) -> None:
        self.policy.remove(request)
        self.memory.drop(request)
        effects.append(DropFromEngine(request.request_id))

    def _end(self, request: Request, now: float, effects: list[Effect]) -> None:
        """It is finished, or has no room here; that is said again and again until its gateway releases it."""
        self.ended[request.request_id] = request
        effects.append(self._last_word(request))
        if self._next_retry_s is None:
            self._next_retry_s = now + self.config.retry_s

    def _last_word(self, request: Request) -> Send:
        request_id, epoch, reason = request.request_id, request.epoch, request.finish_reason
        if reason is None:
            refusal = RefusalReason.OVERLOADED
            return Send(request.gateway, Refused(request_id, epoch, refusal, self.config.retry_s, request.attained))
        return Send(request.gateway, Finished(request_id, epoch, reason, request.num_output))

    # --- iterations --------------------------------------------------------------------------------------------------

    def _run_next_step(self, now: float, effects: list[Effect]) -> None:
        if self._step is not None:
            return
        if not self.requests:
            self.batcher.rest(now)
            return
        batch, refused = self.batcher.plan(now, effects)
        for request in refused:
            request.attained = self.policy.attained(request, now)
            del self.requests[request.request_id]
            self._leave(request, effects)
            self._end(request, now, effects)
        if batch.rows:
            self._begin_step(batch, effects)

    def _begin_step(self, batch: Batch, effects: list[Effect]) -> None:
        rows = batch.rows
        self._num_steps += 1
        starts = [request.num_computed for request, _ in rows]
        self._step = _Step(self._num_steps, batch, starts)
        effects.append(
            RunStep(
                StepPlan(
                    step_id=self._num_steps,
                    request_ids=tuple(request.request_id for request, _ in rows),
                    starts=tuple(starts),
                    token_ids=tuple(
                        tuple(request.token_ids[request.num_computed : request.num_computed + n]) for request, n in rows
                    ),
                    block_tables=tuple(tuple(request.blocks) for request, _ in rows),
                    samples=tuple(n == request.num_uncomputed for request, n in rows),
                )
            )
        )

    def _on_step_done(self, done: StepDone, now: float, effects: list[Effect]) -> None:
        step = self._step
        if step is None or step.step_id != done.step_id:
            raise ValueError(f"step {done.step_id} is done, but was not in flight")
        self._step = None
        batch = step.batch
        assert batch.budget is not None
        self.token_budget.observe(batch.budget, done.duration_s)
        planned = batch.budget.iteration
        decode_s = self.times.decode_s(max(1, planned.num_decodes), planned.num_context_tokens)
        sampled = {request_id: row for row, request_id in enumerate(done.request_ids)}
        made: list[Row] = []
        ended: list[Request] = []
        max_tokens = self.config.max_tokens
        for (request, num_fed), start in zip(batch.rows, step.starts, strict=True):
            if self.requests.get(request.request_id) is not request:
                continue  # gone meanwhile, or replaced by a newer epoch, which is in no step yet
            request.num_computed += num_fed
            self.memory.prefixes.share_computed(request, num_fed)
            row = sampled.get(request.request_id)
            if row is not None:
                request.append(done.token_ids[row], done.logprobs[row] if done.logprobs else None)
            is_decode = num_fed == 1 and row is not None
            # The chunks of a prefill add up to what it takes whole: it joined a level whose quantum holds that.
            service_s = decode_s if is_decode else self.times.prefill_s(start + num_fed) - self.times.prefill_s(start)
            self.policy.on_service(request, service_s, now)
            if row is None:
                continue
            self.batcher.on_token(request, service_s)
            made.append((request, request.num_output - 1))
            if request.check_finished(max_tokens):
                ended.append(request)
        send_tokens(made, effects)
        for request in ended:
            del self.requests[request.request_id]
            self._leave(request, effects)
            self._end(request, now, effects)

    # --- many iterations at once, for a simulator ---------------------------------------------------------------------

    def num_quiet_steps(self) -> int:
        """How many iterations, from the one in flight on, will end in nothing but a token for each of its rows.

        That takes that all requests are in it and decode, that none of these steps gives one its last token, and that
        there are blocks for all of them: then nothing is decided in between, unless a message comes.
        """
        step, memory = self._step, self.memory
        if step is None or memory.is_copying or self.config.prefix_cache:
            return 0
        if not len(self.requests) == len(step.batch.rows) == step.batch.num_decodes:
            return 0
        num_steps = self.config.max_tokens
        for request, _ in step.batch.rows:
            sampling = request.sampling
            if request.num_uncomputed != 1 or sampling.stop_token_ids or request.copy_id is not None:
                return 0
            num_left = min(sampling.max_tokens - request.num_output, self.config.max_tokens - len(request.token_ids))
            num_steps = min(num_steps, num_left - 1)
        # One for each is left beside: with less, blocks are handed out by urgency (``core.batching``).
        num_free = memory.device.num_free_blocks - len(self.requests)
        while num_steps > 0 and self._num_grown_blocks(num_steps) > num_free:
            num_steps //= 2
        return max(0, num_steps)

    def advance(self, ends: Sequence[tuple[float, float]], token_id: int) -> list[Effect]:
        """So many quiet steps (``num_quiet_steps``) have ended, each at (now, duration_s), with this token for all.

        The same as to ``handle`` their StepDones one by one, but for what it costs: their tokens go to each gateway in
        one message, request by request, and of their RunSteps only the last is an effect.
        """
        step, on_service = self._step, self.policy.on_service
        assert step is not None
        batch = step.batch
        firsts = {request: request.num_output for request, _ in batch.rows}
        for now, duration_s in ends:
            budget = batch.budget
            assert budget is not None
            self.token_budget.observe(budget, duration_s)
            decode_s = self.times.decode_s(budget.iteration.num_decodes, budget.iteration.num_context_tokens)
            for request, _ in batch.rows:
                request.num_computed += 1
                request.append(token_id, None)
                on_service(request, decode_s, now)
                if request.owed_s > 0.0:
                    self.batcher.on_token(request, decode_s)
            batch = self.batcher.plan_quiet(now)
            self._num_steps += 1
        self._num_steps -= 1
        effects: list[Effect] = []
        send_tokens(
            ((request, position) for request, first in firsts.items() for position in range(first, request.num_output)),
            effects,
        )
        self._begin_step(batch, effects)
        return effects

    def _num_grown_blocks(self, num_steps: int) -> int:
        """Blocks that all requests grow by in so many iterations."""
        blocks_of = self.memory.blocks_for
        return sum(
            blocks_of(len(request.token_ids) + num_steps) - len(request.blocks) for request in self.requests.values()
        )

    # --- what happens by the clock -----------------------------------------------------------------------------------

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        if self._next_report_s is not None and now >= self._next_report_s:
            self._report_load(now, effects)
            self._next_report_s = now + self.config.load_report_s if self._listeners else None
        if self._next_retry_s is not None and now >= self._next_retry_s:
            effects.extend(self._last_word(request) for request in self.ended.values())
            self._next_retry_s = now + self.config.retry_s if self.ended else None

    def _report_load(self, now: float, effects: list[Effect]) -> None:
        accepted, self._accepted = tuple(self._accepted), []
        self._report_sequence += 1
        report = self._load_report(accepted)
        effects.extend(Send(peer, report) for peer in self._listeners.values())

    def _load_report(self, accepted: tuple[str, ...]) -> LoadReport:
        config, memory = self.config, self.memory
        planned = [request for request in self.batcher.order if self.requests.get(request.request_id) is request]
        order = list(dict.fromkeys([*planned, *self.requests.values()]))
        num_usable = memory.device.num_usable_blocks
        num_host_used = memory.host.num_blocks - memory.host.num_free_blocks
        num_started = sum(request.is_started for request in order)
        return LoadReport(
            sequence=self._report_sequence,
            num_running=num_started,
            num_waiting=len(order) - num_started,
            kv_total_bytes=num_usable * config.bytes_per_block,
            kv_used_bytes=(num_usable - memory.device.num_free_blocks) * config.bytes_per_block,
            virtual_usage_bytes=virtual_usage_bytes(
                order, memory.held_blocks, memory.blocks_wanted, config.bytes_per_block, config.headroom_bytes
            ),
            bytes_per_block=config.bytes_per_block,
            tokens_per_block=config.tokens_per_block,
            num_preemptions=self.batcher.num_preemptions,
            accepted=accepted,
            draining=self.draining,
            num_tokens_looked_up=memory.prefixes.num_tokens_looked_up,
            num_tokens_found=memory.prefixes.num_tokens_found,
            host_total_bytes=memory.host.num_blocks * config.bytes_per_block,
            host_used_bytes=num_host_used * config.bytes_per_block,
            kv_needed_bytes=memory.held_blocks * config.bytes_per_block,
            num_swapped=sum(request.is_swapped for request in order),
            num_swap_outs=memory.num_swap_outs,
            swapped_bytes=memory.num_copied_blocks * config.bytes_per_block,
            swap_blocked_s=self.batcher.blocked_s,
        )
