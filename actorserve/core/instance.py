"""One instance's scheduler: admission, continuous batching, preemption, and the life of each request on it.

Prefill chunks and decode tokens share an iteration, within ``max_batch_tokens`` and what ``core.token_budget`` finds. A
request is admitted when the blocks of all its tokens so far are free, and grows by a block as it decodes; when none is
left, the least urgent started request is preempted and later recomputed. Blocks that an iteration filled are shared
with requests that begin with the same tokens, and outlive their owner until their place is needed. One iteration is in
flight at a time.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from actorserve.core.blocks import BlockAllocator, blocks_for
from actorserve.core.effects import AddToEngine, Drained, DropFromEngine, Effect, RunStep, Send
from actorserve.core.freeness import virtual_usage_bytes
from actorserve.core.messages import (
    LOCAL,
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
    Tokens,
)
from actorserve.core.policy import SchedulingPolicy
from actorserve.core.prefix_cache import PrefixCache
from actorserve.core.request import Request
from actorserve.core.token_budget import IterationBudget, TokenBudget


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

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that can be served."""
        return min(self.max_context_tokens, self.num_blocks * self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class _Step:
    """The iteration in flight."""

    step_id: int
    rows: list[tuple[Request, int]]  # request, tokens fed
    budget: IterationBudget


class InstanceState:
    """The pure state machine of one instance. ``handle`` never blocks and never fails on what a peer sends."""

    def __init__(self, config: InstanceConfig, policy: SchedulingPolicy) -> None:
        self.config = config
        self.policy = policy
        self.allocator = BlockAllocator(config.num_blocks)
        self.prefixes = PrefixCache(self.allocator, config.tokens_per_block, config.prefix_cache)
        self.token_budget = TokenBudget(config.tpot_target_s, config.max_batch_tokens)
        self.requests: dict[str, Request] = {}  # waiting or started
        self.finished: dict[str, Request] = {}  # until their gateway releases them
        self.num_preemptions = 0
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
                effects.append(Send(peer, self._load_report(now, ())))
                if self._next_report_s is None:
                    self._next_report_s = now + self.config.load_report_s
            case PeerDown(peer=peer):
                self._on_peer_down(peer, effects)
            case Tick():
                self._on_tick(now, effects)
            case MemoryLimit(num_blocks=num_blocks):
                self.allocator.limit(num_blocks)
            case Drain():
                self.draining = True
                self._report_load(now, effects)
            case _:
                self.num_stale_messages += 1
        self._run_next_step(now, effects)
        if self.draining and not self._said_drained and not self.requests and not self.finished:
            self._said_drained = True
            effects.append(Drained())
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return min((t for t in (self._next_report_s, self._next_retry_s) if t is not None), default=None)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_start(self, message: Start, gateway: Peer, now: float, effects: list[Effect]) -> None:
        spec, epoch = message.request, message.epoch
        present = self.requests.get(spec.request_id) or self.finished.get(spec.request_id)
        if present is not None and present.epoch >= epoch:
            if present.epoch == epoch:
                effects.append(Send(gateway, Started(spec.request_id, epoch)))
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
            self._finish(request, now, effects)
            return
        self.requests[spec.request_id] = request
        self.policy.add(request, now, attained=message.attained)
        effects.append(AddToEngine(spec))

    def _refusal(self, request: Request) -> RefusalReason | None:
        if self.draining:
            return RefusalReason.DRAINING
        if not request.spec.prompt_token_ids or len(request.token_ids) > self.config.max_tokens:
            return RefusalReason.TOO_LARGE
        return None

    def _on_release(self, message: Release, effects: list[Effect]) -> None:
        request = self.requests.get(message.request_id) or self.finished.get(message.request_id)
        if request is not None and request.epoch <= message.epoch:
            self._remove(request, effects)

    def _on_peer_down(self, peer: Peer, effects: list[Effect]) -> None:
        if self._listeners.get(peer.name) == peer:
            del self._listeners[peer.name]
        for request in [*self.requests.values(), *self.finished.values()]:
            if request.gateway == peer:
                self._remove(request, effects)

    def _on_resend(self, message: Resend, effects: list[Effect]) -> None:
        request = self.requests.get(message.request_id) or self.finished.get(message.request_id)
        if request is None or request.epoch != message.epoch:
            self.num_stale_messages += 1
            return
        first = max(message.from_position, request.resumed_output)
        positions = tuple(range(first, request.num_output))
        if positions:
            start = len(request.spec.prompt_token_ids) + first
            logprobs = request.logprobs[first - request.resumed_output :]
            effects.append(
                Send(
                    request.gateway,
                    Tokens(
                        request_ids=(request.request_id,) * len(positions),
                        epochs=(request.epoch,) * len(positions),
                        positions=positions,
                        token_ids=tuple(request.token_ids[start:]),
                        logprobs=tuple(logprobs) if any(logprobs) else (),
                        num_cached_tokens=_cached_tokens(repeat(request), positions),
                    ),
                )
            )
        if request.finish_reason is not None:
            effects.append(_finished(request))

    def _remove(self, request: Request, effects: list[Effect]) -> None:
        """Forget a request, in whatever state it is.

        Its blocks are free at once, also under an iteration that still writes them: blocks are handed out only when
        the next iteration is planned, and that is after this one is done.
        """
        if self.finished.get(request.request_id) is request:
            del self.finished[request.request_id]
            return
        del self.requests[request.request_id]
        self._leave(request, effects)

    def _leave(self, request: Request, effects: list[Effect]) -> None:
        self.policy.remove(request)
        self.allocator.free(request.blocks)
        request.blocks = []
        effects.append(DropFromEngine(request.request_id))

    def _finish(self, request: Request, now: float, effects: list[Effect]) -> None:
        self.finished[request.request_id] = request
        effects.append(_finished(request))
        if self._next_retry_s is None:
            self._next_retry_s = now + self.config.retry_s

    # --- iterations --------------------------------------------------------------------------------------------------

    def _run_next_step(self, now: float, effects: list[Effect]) -> None:
        if self._step is not None or not self.requests:
            return
        rows, budget = self._choose_batch(now)
        if not rows:
            return
        self._num_steps += 1
        self._step = _Step(self._num_steps, rows, budget)
        effects.append(
            RunStep(
                StepPlan(
                    step_id=self._num_steps,
                    request_ids=tuple(request.request_id for request, _ in rows),
                    starts=tuple(request.num_computed for request, _ in rows),
                    token_ids=tuple(
                        tuple(request.token_ids[request.num_computed : request.num_computed + n]) for request, n in rows
                    ),
                    block_tables=tuple(tuple(request.blocks) for request, _ in rows),
                    samples=tuple(n == request.num_uncomputed for request, n in rows),
                )
            )
        )

    def _choose_batch(self, now: float) -> tuple[list[tuple[Request, int]], IterationBudget]:
        """The next iteration's rows: every decode that finds a block, then prefills as far as the budget goes.

        Decodes come first because each costs one token and its client waits for it; prefills in scheduling order share
        the rest. Only a started request's growth preempts; an admission never does. A request that would not fit even
        if all others left, because memory is short now, lets those behind it pass.
        """
        order = self.policy.order(now)
        started = [request for request in order if request.is_started]
        rows: list[tuple[Request, int]] = []
        for request in list(started):
            if not request.is_started or request.num_uncomputed > 1 or len(rows) >= self.config.max_batch_tokens:
                continue
            if self._grow(request, started):
                rows.append((request, 1))
        budget = self.token_budget.begin(len(rows), sum(len(request.token_ids) for request, _ in rows))
        for request in started:
            if request.num_uncomputed > 1 and not budget.is_spent:
                rows.append((request, budget.take(request.num_uncomputed, request.num_computed)))
        for request in order:
            num_blocks = blocks_for(len(request.token_ids), self.config.tokens_per_block)
            if request.is_started or num_blocks > self.allocator.num_usable_blocks:
                continue
            if budget.is_spent or not self._admit(request, started):
                break
            rows.append((request, budget.take(request.num_uncomputed, request.num_computed)))
        return rows, budget

    def _grow(self, request: Request, started: list[Request]) -> bool:
        """Make room for one more token's KV, preempting from the back of ``started``.

        False if ``request`` was at the back itself, and is preempted.
        """
        if blocks_for(len(request.token_ids), self.config.tokens_per_block) <= len(request.blocks):
            return True
        while (blocks := self.allocator.allocate(1)) is None:
            victim = started.pop()
            self.allocator.free(victim.blocks)
            victim.blocks = []
            victim.num_computed = 0
            self.num_preemptions += 1
            if victim is request:
                return False
        request.blocks += blocks
        return True

    def _admit(self, request: Request, started: list[Request]) -> bool:
        """Start a waiting request if the blocks it needs are free, and one more for each that is started already.

        That reserve keeps a newcomer from being preempted, and recomputed, by the very next growth.
        """
        if len(started) >= self.config.max_batch_requests:
            return False
        if self.prefixes.num_blocks_wanted(request) + len(started) > self.allocator.num_free_blocks:
            return False
        self.prefixes.start(request)
        started.append(request)
        return True

    def _on_step_done(self, done: StepDone, now: float, effects: list[Effect]) -> None:
        step = self._step
        if step is None or step.step_id != done.step_id:
            raise ValueError(f"step {done.step_id} is done, but was not in flight")
        self._step = None
        self.token_budget.observe(step.budget, done.duration_s)
        sampled = {request_id: row for row, request_id in enumerate(done.request_ids)}
        rows_of_gateway: dict[Peer, list[tuple[Request, int]]] = {}
        ended: list[Request] = []
        max_tokens = self.config.max_tokens
        for request, num_fed in step.rows:
            if self.requests.get(request.request_id) is not request:
                continue  # gone meanwhile, or replaced by a newer epoch, which is in no step yet
            request.num_computed += num_fed
            self.prefixes.share_computed(request, num_fed)
            self.policy.on_service(request, done.duration_s, now)
            row = sampled.get(request.request_id)
            if row is None:
                continue
            request.append(done.token_ids[row], done.logprobs[row] if done.logprobs else None)
            rows_of_gateway.setdefault(request.gateway, []).append((request, row))
            if request.check_finished(max_tokens):
                ended.append(request)
        for gateway, rows in rows_of_gateway.items():
            logprobs = tuple(request.logprobs[-1] for request, _ in rows)
            positions = tuple(request.num_output - 1 for request, _ in rows)
            effects.append(
                Send(
                    gateway,
                    Tokens(
                        request_ids=tuple(request.request_id for request, _ in rows),
                        epochs=tuple(request.epoch for request, _ in rows),
                        positions=positions,
                        token_ids=tuple(request.token_ids[-1] for request, _ in rows),
                        logprobs=logprobs if any(logprobs) else (),
                        num_cached_tokens=_cached_tokens((request for request, _ in rows), positions),
                    ),
                )
            )
        for request in ended:
            del self.requests[request.request_id]
            self._leave(request, effects)
            self._finish(request, now, effects)

    # --- what happens by the clock -----------------------------------------------------------------------------------

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        if self._next_report_s is not None and now >= self._next_report_s:
            self._report_load(now, effects)
            self._next_report_s = now + self.config.load_report_s if self._listeners else None
        if self._next_retry_s is not None and now >= self._next_retry_s:
            effects.extend(_finished(request) for request in self.finished.values())
            self._next_retry_s = now + self.config.retry_s if self.finished else None

    def _report_load(self, now: float, effects: list[Effect]) -> None:
        accepted, self._accepted = tuple(self._accepted), []
        self._report_sequence += 1
        report = self._load_report(now, accepted)
        effects.extend(Send(peer, report) for peer in self._listeners.values())

    def _load_report(self, now: float, accepted: tuple[str, ...]) -> LoadReport:
        config = self.config
        order = self.policy.order(now)
        num_usable = self.allocator.num_usable_blocks
        num_used = num_usable - self.allocator.num_free_blocks
        num_running = sum(request.is_started for request in self.requests.values())
        return LoadReport(
            sequence=self._report_sequence,
            num_running=num_running,
            num_waiting=len(self.requests) - num_running,
            kv_total_bytes=num_usable * config.bytes_per_block,
            kv_used_bytes=num_used * config.bytes_per_block,
            virtual_usage_bytes=virtual_usage_bytes(
                order, num_used, self.prefixes.num_blocks_wanted, config.bytes_per_block, config.headroom_bytes
            ),
            bytes_per_block=config.bytes_per_block,
            tokens_per_block=config.tokens_per_block,
            num_preemptions=self.num_preemptions,
            accepted=accepted,
            draining=self.draining,
            num_tokens_looked_up=self.prefixes.num_tokens_looked_up,
            num_tokens_found=self.prefixes.num_tokens_found,
        )


def _cached_tokens(requests: Iterable[Request], positions: Sequence[int]) -> tuple[int, ...]:
    """The last column of ``Tokens``, for rows of these requests at these positions."""
    if 0 not in positions:
        return ()
    column = tuple(
        request.num_cached_tokens or 0 if position == 0 else 0
        for request, position in zip(requests, positions, strict=False)
    )
    return column if any(column) else ()


def _finished(request: Request) -> Send:
    assert request.finish_reason is not None
    return Send(request.gateway, Finished(request.request_id, request.epoch, request.finish_reason, request.num_output))
