"""One instance's scheduler: the life of each request on it, and what its engine does next.

The policy (``core.scheduling``) orders the requests; the batcher chooses those of each iteration and moves KV to and
from the host. Filled blocks are shared by requests with the same beginning, and stay cached until needed. One iteration
is in flight, with copies beside it. Requests move between instances while they run (``core.migration``).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actorserve.core.checkpoints.source import CheckpointSource
from actorserve.core.checkpoints.store import CheckpointStore
from actorserve.core.effects import AddToEngine, Drained, DropFromEngine, Effect, RunStep, Send
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.load_report import memory_report
from actorserve.core.instance.outbox import Outbox
from actorserve.core.instance.token_output import Row, send_tokens
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.messages import (
    LOCAL,
    Checkpoint,
    CheckpointConfirmed,
    CheckpointTo,
    Copied,
    CopyDone,
    CopyFailed,
    Declined,
    DeclineReason,
    Drain,
    Keep,
    LoadReport,
    MemoryLimit,
    Message,
    MigrateTo,
    Offer,
    Peer,
    PeerDown,
    PeerUp,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Role,
    Stage,
    Start,
    Started,
    StepDone,
    Tick,
    Withdrawn,
)
from actorserve.core.migration.destination import MigrationDestination
from actorserve.core.migration.source import MigrationSource
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch
from actorserve.core.scheduling.batching import Batcher
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.token_budget import TokenBudget
from actorserve.core.timing.step_times import StepTimes

_KEEP_AFTER_DEATH_S = 10.0  # checkpoints of a dead worker's requests: its gateways hear of it, and ask for them


@dataclass(frozen=True, slots=True)
class _Step:
    """The iteration in flight."""

    step_id: int
    batch: Batch
    starts: Sequence[int]  # of each row: the tokens computed before

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.batch.rows]


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
        self.migration_source = MigrationSource(
            config.migration, self.memory, policy, times, self.requests, config.tokens_per_block, config.retry_s
        )
        self.migration_destination = MigrationDestination(
            self.memory, config.max_tokens, config.migration, policy.reserves_output
        )
        self.checkpoints = CheckpointSource(
            self.memory, self.requests, config.migration.ticket_key, config.checkpoint_tokens
        )
        self.checkpoint_store = CheckpointStore(self.memory, _KEEP_AFTER_DEATH_S)
        self.memory.evict_checkpoints = self.checkpoint_store.give_up
        self.ended = Outbox(config.retry_s)
        self.leaving: list[Request] = []  # gone, and the iteration in flight still writes their blocks
        self.num_stale_messages = 0
        self.draining = False
        self._said_drained = False
        self._listeners: dict[str, Peer] = {}
        self._step: _Step | None = None
        self._num_steps = 0
        self._report_sequence = 0
        self._accepted: list[str] = []
        self._next_report_s: float | None = None

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
            case PeerUp(peer=peer, role=Role.WORKER, worker=worker):
                for side in (
                    self.migration_source,
                    self.migration_destination,
                    self.checkpoints,
                    self.checkpoint_store,
                ):
                    side.on_peer_up(peer, None if worker is None else worker.kv)
            case PeerDown(peer=peer):
                self._on_peer_down(peer, now, effects)
            case Tick():
                self._on_tick(now, effects)
            case CopyDone(copy_id=copy_id) | CopyFailed(copy_id=copy_id) if self.memory.is_fetch(copy_id):
                request, failed = self.memory.on_fetched(copy_id), isinstance(message, CopyFailed)
                if request is not None and not self.migration_destination.on_fetched(
                    request, now, effects, failed=failed
                ):
                    self.checkpoint_store.on_fetched(request, effects, failed=failed)
            case CopyDone(copy_id=copy_id, duration_s=duration_s):
                self.times.observe_swap(self.memory.on_copy_done(copy_id), duration_s)
            case MigrateTo() | Copied() | Declined() | Keep() | Offer() | Stage() | Withdrawn():
                self._on_migration(message, now, sender, effects)
            case CheckpointTo(holder=holder):
                self.checkpoints.on_order(holder, effects)
            case Checkpoint():
                self.checkpoint_store.on_checkpoint(message, sender, now, effects)
            case CheckpointConfirmed():
                self.checkpoint_store.on_confirmed(message, sender, now)
            case MemoryLimit(num_blocks=num_blocks):
                self.memory.device.limit(num_blocks)
            case Drain():
                self.draining = True
                self.migration_destination.decline_all(effects)
                self.checkpoint_store.let_all_go()
                self._report_load(now, effects)
            case _:
                self.num_stale_messages += 1
        if self.migration_source.is_busy:
            self.migration_source.settle(self._running, now, effects)
        self.checkpoints.settle(now, effects)
        self._run_next_step(now, effects)
        if self.draining and not self._said_drained and not self.requests and not self.ended:
            self._said_drained = True
            effects.append(Drained())
        return effects

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        deadlines = (
            self._next_report_s,
            self.ended.next_retry_s,
            self.migration_source.next_deadline(),
            self.migration_destination.next_deadline(),
            self.checkpoints.next_deadline(),
            self.checkpoint_store.next_deadline(),
        )
        return min((t for t in deadlines if t is not None), default=None)

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_start(self, message: Start, gateway: Peer, now: float, effects: list[Effect]) -> None:
        spec, epoch = message.request, message.epoch
        present = self.requests.get(spec.request_id) or self.ended.get(spec.request_id)
        if present is not None and present.epoch >= epoch:
            if present.epoch == epoch:
                effects.append(Send(gateway, Started(spec.request_id, epoch)))
                if spec.request_id in self.ended:
                    effects.append(self.ended.last_word(present))
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
            self.ended.say(request, now, effects)
            return
        self.requests[spec.request_id] = request
        migration = message.migration
        is_adopted = migration is not None and (
            self.migration_destination.adopt(migration, request) or self.checkpoint_store.adopt(migration, request)
        )
        num_cached = request.num_computed if is_adopted else self.memory.prefixes.num_cached_tokens(request)
        self.policy.add(request, now, num_cached, message.attained)
        if is_adopted:
            # As one that was swapped in: it stays for as much service as coming cost (``core.scheduling.swapping``).
            request.owed_s = self.times.transfer_s(self.memory.bytes_of(request))
        else:
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

    def _on_peer_down(self, peer: Peer, now: float, effects: list[Effect]) -> None:
        if self._listeners.get(peer.name) == peer:
            del self._listeners[peer.name]
        for side in (self.migration_source, self.migration_destination, self.checkpoints, self.checkpoint_store):
            side.on_peer_down(peer, now)
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
            effects.append(self.ended.last_word(request))

    def _remove(self, request: Request, effects: list[Effect]) -> None:
        """Forget a request, in whatever state it is. Its blocks are free as soon as no copy under way and no iteration
        in flight touches them.
        """
        if self.ended.get(request.request_id) is request:
            del self.ended[request.request_id]
            return
        del self.requests[request.request_id]
        self._leave(request, effects)

    def _leave(self, request: Request, effects: list[Effect]) -> None:
        self.migration_source.on_gone(request, effects)
        self.checkpoints.on_gone(request, effects)
        self.policy.remove(request)
        if request in self._running:
            self.leaving.append(request)
        else:
            self.memory.drop(request)
        effects.append(DropFromEngine(request.request_id))

    # --- migration ---------------------------------------------------------------------------------------------------

    def _on_migration(
        self,
        message: MigrateTo | Copied | Declined | Keep | Offer | Stage | Withdrawn,
        now: float,
        sender: Peer,
        effects: list[Effect],
    ) -> None:
        is_expected = True
        match message:
            case MigrateTo():
                self.migration_source.on_order(message, now, effects)
            case Copied():
                is_expected = self.migration_source.on_copied(message, sender, now, effects)
                is_expected = is_expected or self.checkpoints.on_copied(message, sender, effects)
                if not is_expected and not self.migration_source.knows(message.number, sender):
                    effects.append(Send(sender, Withdrawn(message.number)))  # told before, but that may have been lost
            case Declined():
                is_expected = self.migration_source.on_declined(message, sender)
                is_expected = is_expected or self.checkpoints.on_declined(message, sender, now)
            case Keep(request_id=request_id, epoch=epoch):
                is_expected = self.migration_source.on_keep(request_id, epoch, effects)
            case Offer(number=number) if self.draining:
                effects.append(Send(sender, Declined(number, DeclineReason.DRAINING)))
            case Offer():
                # A block is left for each that runs: to take it, and send somebody away for want of it, wins nothing.
                self.migration_destination.on_offer(message, sender, len(self._running), now, effects)
            case Stage():
                self.migration_destination.on_stage(message, sender, now, effects)
            case Withdrawn(number=number):
                self.migration_destination.on_withdrawn(number, sender)
                self.checkpoint_store.on_withdrawn(number, sender)
        self.num_stale_messages += not is_expected

    @property
    def _running(self) -> Collection[Request]:
        """Those in the iteration in flight."""
        return () if self._step is None else self._step.requests

    # --- iterations --------------------------------------------------------------------------------------------------

    def _run_next_step(self, now: float, effects: list[Effect]) -> None:
        if self._step is not None:
            return
        if not self.requests:
            self.batcher.rest(now)
            return
        batch, refused = self.batcher.plan(now, effects, self.migration_source.paused)
        for request in refused:
            request.attained = self.policy.attained(request, now)
            del self.requests[request.request_id]
            self._leave(request, effects)
            self.ended.say(request, now, effects)
        if batch.rows:
            self._begin_step(batch, effects)

    def _begin_step(self, batch: Batch, effects: list[Effect]) -> None:
        self._num_steps += 1
        plan = batch.step_plan(self._num_steps)
        self._step = _Step(self._num_steps, batch, plan.starts)
        effects.append(RunStep(plan))

    def _on_step_done(self, done: StepDone, now: float, effects: list[Effect]) -> None:
        step = self._step
        if step is None or step.step_id != done.step_id:
            raise ValueError(f"step {done.step_id} is done, but was not in flight")
        self._step = None
        for request in self.leaving:
            self.memory.drop(request)
        self.leaving.clear()
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
            self.ended.say(request, now, effects)

    # --- many iterations at once, for a simulator ---------------------------------------------------------------------

    def num_quiet_steps(self) -> int:
        """How many iterations, from the one in flight on, will end in nothing but a token for each of its rows.

        That takes that all requests are in it and decode, that none of these steps gives one its last token, and that
        there are blocks for all of them: then nothing is decided in between, unless a message comes.
        """
        step, memory = self._step, self.memory
        if step is None or memory.is_copying or self.config.prefix_cache:
            return 0
        if self.migration_source.wants_step_end or self.checkpoints.holder is not None:
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
        # One for each is left beside: with less, blocks are handed out by urgency (``core.scheduling.batching``).
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
        self.ended.on_tick(now, effects)
        self.migration_source.on_tick(now, effects)
        self.migration_destination.on_tick(now, effects)
        self.checkpoint_store.on_tick(now, effects)

    def _report_load(self, now: float, effects: list[Effect]) -> None:
        accepted, self._accepted = tuple(self._accepted), []
        self._report_sequence += 1
        report = self._load_report(accepted)
        effects.extend(Send(peer, report) for peer in self._listeners.values())

    def _load_report(self, accepted: tuple[str, ...]) -> LoadReport:
        planned = [request for request in self.batcher.order if self.requests.get(request.request_id) is request]
        order = list(dict.fromkeys([*planned, *self.requests.values()]))
        config, migration_source = self.config, self.migration_source
        return replace(
            memory_report(self.memory, order, config.headroom_bytes),
            sequence=self._report_sequence,
            num_preemptions=self.batcher.num_preemptions,
            accepted=accepted,
            draining=self.draining,
            swap_blocked_s=self.batcher.blocked_s,
            num_migrating=len(migration_source) + len(self.migration_destination),
            num_migrated=migration_source.num_migrated,
            num_migrations_failed=migration_source.num_failed,
            migrated_bytes=migration_source.migrated_bytes,
            checkpointed_bytes=self.checkpoints.checkpointed_bytes,
            kv_reserved_bytes=self.memory.bytes_of_blocks(self.migration_destination.num_blocks),
        )
