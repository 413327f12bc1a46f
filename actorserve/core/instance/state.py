"""One instance's scheduler: the life of each request on it, and what its engine does next.

The policy (``core.scheduling``) orders the requests. The batcher chooses each iteration's requests anew, and moves KV
between device and host. Blocks that an iteration filled are shared with requests that begin with the same tokens, and
stay cached until their place is needed. One iteration is in flight at a time, and copies run in parallel to it.

The four participants (``core.participant``) copy KV to and from other instances: requests migrate while they run
(``core.migration``), and are checkpointed in case their worker dies (``core.checkpoints``).
"""

from dataclasses import replace

from actorserve.core.checkpoints.source import CheckpointSource
from actorserve.core.checkpoints.store import CheckpointStore
from actorserve.core.effects import AddToEngine, Drained, DropFromEngine, Effect, Effects
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.load_report import LoadReporter, memory_report
from actorserve.core.instance.outbox import Outbox
from actorserve.core.instance.quiet_steps import QuietSteps
from actorserve.core.instance.steps import Steps
from actorserve.core.instance.token_output import send_tokens
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.messages import (
    LOCAL,
    CopyDone,
    CopyFailed,
    Drain,
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
    Tick,
    TransferMessage,
)
from actorserve.core.migration.destination import MigrationDestination
from actorserve.core.migration.source import MigrationSource
from actorserve.core.participant import Handler, Participant, Receiver
from actorserve.core.request import Request
from actorserve.core.scheduling.batching import Batcher
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.token_budget import TokenBudget
from actorserve.core.timing.step_times import StepTimes

_KEEP_AFTER_DEATH_S = 10.0  # checkpoints of a dead worker, until its gateways have noticed and asked for them


class InstanceState:
    """The pure state machine of one instance. ``handle`` never blocks and never fails on what a peer sends."""

    def __init__(self, config: InstanceConfig, policy: SchedulingPolicy, times: StepTimes) -> None:
        """``policy`` uses the same ``times``."""
        self.config = config
        self.requests: dict[str, Request] = {}  # waiting or started
        self.policy = policy
        self.times = times
        self._effects = effects = Effects()
        self.outbox = Outbox(config.retry_s, effects)
        pools = KVPools(config.num_blocks, config.num_host_blocks, config.tokens_per_block, config.bytes_per_block)
        self.checkpoint_store = CheckpointStore(pools, _KEEP_AFTER_DEATH_S, effects)
        self.memory = memory = KVMemory(pools, self.checkpoint_store, effects, prefix_cache=config.prefix_cache)
        self.batcher = Batcher(
            memory,
            policy,
            times,
            TokenBudget(config.tpot_target_s, config.max_batch_tokens, times),
            mode=config.swap_mode,
            max_batch_requests=config.max_batch_requests,
            max_batch_tokens=config.max_batch_tokens,
            max_tokens=config.max_tokens,
        )
        self.steps = Steps(self.requests, memory, policy, times, self.batcher, config.max_tokens, effects)
        self.migration_source = MigrationSource(
            config.migration, config.retry_s, memory, policy, times, self.requests, self.steps, effects
        )
        self.migration_destination = MigrationDestination(
            config.migration, config.max_tokens, policy.reserves_output, memory, self.steps, effects
        )
        self.checkpoint_source = CheckpointSource(
            config.migration.ticket_key, config.checkpoint_tokens, memory, self.requests, effects
        )
        self._participants: tuple[Participant, ...] = (
            self.migration_source,
            self.migration_destination,
            self.checkpoint_source,
            self.checkpoint_store,
        )
        receivers: tuple[Receiver, ...] = (self.migration_destination, self.checkpoint_store)
        self._receivers = {receiver.kind: receiver for receiver in receivers}
        self.quiet_steps = QuietSteps(
            config, self.requests, memory, policy, times, self.batcher, self.steps, self._participants, effects
        )
        self.load_reporter = LoadReporter(self._load_report, config.load_report_s, effects)
        self.num_stale_messages = 0
        self._is_draining = False
        self._has_drained = False
        self._handlers: dict[type[Message], Handler] = {
            Start: self._on_start,
            StepDone: self._on_step_done,
            Release: self._on_release,
            Resend: self._on_resend,
            PeerUp: self._on_peer_up,
            PeerDown: self._on_peer_down,
            Tick: self._on_tick,
            CopyDone: self._on_copy_ended,
            CopyFailed: self._on_copy_ended,
            MemoryLimit: self._on_memory_limit,
            Drain: self._on_drain,
        }
        for participant in self._participants:
            self._handlers.update(participant.handlers)
        self._transfer_handlers = {
            (message_type, participant.kind): handler
            for participant in self._participants
            for message_type, handler in participant.transfer_handlers.items()
        }

    # --- the shell's calls -------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local messages have no sender), and return what is to be done, in order."""
        handler = self._handlers.get(type(message))
        if handler is None and isinstance(message, TransferMessage):
            handler = self._transfer_handlers.get((type(message), message.transfer.kind))
        if handler is None or handler(message, sender or LOCAL, now) is False:
            self.num_stale_messages += 1
        for participant in self._participants:
            participant.settle(now)
        self._run_next_step(now)
        if self._is_draining and not self._has_drained and not self.requests and not self.outbox:
            self._has_drained = True
            self._effects.append(Drained())
        return self._effects.take()

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        deadlines = [participant.next_deadline() for participant in self._participants]
        deadlines += (self.load_reporter.next_report_s, self.outbox.next_retry_s)
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold. Tests call it after each event."""
        requests, outbox, steps = self.requests, self.outbox, self.steps
        assert not requests.keys() & outbox.keys(), "a request is here, and has ended"
        assert not any(request.is_started for request in outbox.values()), "a request that ended holds blocks"
        assert all(request.finish_reason is None for request in requests.values()), "a finished request is still here"
        ordered = self.policy.requests
        assert len(ordered) == len(requests), f"the policy orders {len(ordered)} requests of {len(requests)}"
        assert {id(request) for request in ordered} == {id(request) for request in requests.values()}, (
            "the policy orders other requests"
        )
        for participant in self._participants:
            participant.validate()
        steps.validate()
        self.memory.validate(
            [*requests.values(), *steps.leaving], self.migration_destination.holdings, self.checkpoint_store.holdings
        )

    # --- requests come and go ----------------------------------------------------------------------------------------

    def _on_start(self, message: Start, gateway: Peer, now: float) -> bool | None:
        spec, epoch = message.request, message.epoch
        present = self._find(spec.request_id)
        if present is not None and present.epoch > epoch:
            return False
        if present is not None and present.epoch == epoch:
            self._effects.send(gateway, Started(spec.request_id, epoch))
            if spec.request_id in self.outbox:
                self.outbox.send(present)
            return None
        if present is not None:
            self._remove(present)
        request = Request(spec, epoch, gateway)
        refusal = self._refusal(request)
        if refusal is not None:
            self._effects.send(gateway, Refused(spec.request_id, epoch, refusal, retry_after_s=self.config.retry_s))
            return None
        self.load_reporter.accept(spec.request_id)
        self._effects.send(gateway, Started(spec.request_id, epoch))
        if request.check_finished(self.config.max_tokens):
            # Its last owner died after it made the last token and before it said so.
            self.outbox.add(request, now)
            return None
        self._admit(request, message, now)
        return None

    def _admit(self, request: Request, start: Start, now: float) -> None:
        self.requests[request.request_id] = request
        transfer = start.transfer
        if transfer is not None and self._receivers[transfer.id.kind].adopt(transfer, request):
            self.policy.add(request, now, request.num_computed, start.attained)
            # Like a request that was swapped in, it stays for as much service as the copy cost.
            request.owed_s = self.times.transfer_s(self.memory.bytes_of(request))
        else:
            self.policy.add(request, now, self.memory.prefixes.num_cached_tokens(request), start.attained)
            self.batcher.on_arrival(request, now)
        self._effects.append(AddToEngine(start.request))

    def _refusal(self, request: Request) -> RefusalReason | None:
        if self._is_draining:
            return RefusalReason.DRAINING
        if not request.spec.prompt_token_ids or len(request.token_ids) > self.config.max_tokens:
            return RefusalReason.TOO_LARGE
        return None

    def _on_release(self, message: Release, gateway: Peer, now: float) -> None:
        request = self._find(message.request_id)
        if request is not None and request.epoch <= message.epoch:
            self._remove(request)

    def _on_resend(self, message: Resend, gateway: Peer, now: float) -> bool | None:
        request = self._find(message.request_id)
        if request is None or request.epoch != message.epoch:
            return False
        first = max(message.from_position, request.resumed_output)
        send_tokens(((request, position) for position in range(first, request.num_output)), self._effects)
        if message.request_id in self.outbox:
            self.outbox.send(request)
        return None

    def _find(self, request_id: str) -> Request | None:
        return self.requests.get(request_id) or self.outbox.get(request_id)

    def _end(self, request: Request, now: float) -> None:
        """The request has finished, or is given back; its gateway hears of it until it releases the request."""
        self._forget(request)
        self.outbox.add(request, now)

    def _remove(self, request: Request) -> None:
        """Forget a request, in whatever state it is."""
        if self.outbox.get(request.request_id) is request:
            del self.outbox[request.request_id]
        else:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Its blocks are free as soon as no copy and no iteration in flight touches them."""
        del self.requests[request.request_id]
        for participant in self._participants:
            participant.on_gone(request)
        self.policy.remove(request)
        self.steps.free(request)
        self._effects.append(DropFromEngine(request.request_id))

    # --- iterations and copies ---------------------------------------------------------------------------------------

    def _run_next_step(self, now: float) -> None:
        if self.steps.in_flight is not None:
            return
        if not self.requests:
            self.batcher.rest(now)
            return
        batch, refused = self.batcher.plan(now, self.migration_source.paused)
        for request in refused:
            request.attained = self.policy.attained(request, now)
            self._end(request, now)
        if batch.rows:
            self.steps.begin(batch)

    def _on_step_done(self, done: StepDone, sender: Peer, now: float) -> None:
        for request in self.steps.finish(done, now):
            self._end(request, now)

    def _on_copy_ended(self, message: CopyDone | CopyFailed, sender: Peer, now: float) -> bool | None:
        pools, is_done = self.memory.pools, isinstance(message, CopyDone)
        if pools.is_fetch(message.copy_id):
            transfer = pools.on_fetched(message.copy_id)
            if transfer is not None:
                self._receivers[transfer.id.kind].on_fetched(transfer, now, failed=not is_done)
        elif isinstance(message, CopyDone):
            self.times.observe_swap(self.memory.on_copy_done(message.copy_id), message.duration_s)
        else:
            return False
        return None

    def _on_memory_limit(self, message: MemoryLimit, sender: Peer, now: float) -> None:
        self.memory.device.limit(message.num_blocks)

    # --- peers, time and load ----------------------------------------------------------------------------------------

    def _on_peer_up(self, message: PeerUp, sender: Peer, now: float) -> None:
        if message.role is not Role.WORKER:
            self.load_reporter.on_peer_up(message.peer, now)
            return
        for participant in self._participants:
            participant.on_peer_up(message.peer, message.kv)

    def _on_peer_down(self, message: PeerDown, sender: Peer, now: float) -> None:
        self.load_reporter.on_peer_down(message.peer)
        for participant in self._participants:
            participant.on_peer_down(message.peer, now)
        for request in [*self.requests.values(), *self.outbox.values()]:
            if request.gateway == message.peer:
                self._remove(request)

    def _on_tick(self, message: Tick, sender: Peer, now: float) -> None:
        self.load_reporter.on_tick(now)
        self.outbox.on_tick(now)
        for participant in self._participants:
            participant.on_tick(now)

    def _on_drain(self, message: Drain, sender: Peer, now: float) -> None:
        self._is_draining = True
        for participant in self._participants:
            participant.on_drain()
        self.load_reporter.send()

    def _load_report(self, sequence: int, accepted: tuple[str, ...]) -> LoadReport:
        planned = [request for request in self.batcher.order if self.requests.get(request.request_id) is request]
        order = list(dict.fromkeys([*planned, *self.requests.values()]))
        source, destination = self.migration_source, self.migration_destination
        return replace(
            memory_report(self.memory, order, self.config.headroom_bytes),
            sequence=sequence,
            accepted=accepted,
            num_preemptions=self.batcher.num_preemptions,
            draining=self._is_draining,
            swap_blocked_s=self.batcher.blocked_s,
            num_migrating=len(source) + len(destination),
            num_migrated=source.num_migrated,
            num_migrations_failed=source.num_failed,
            migrated_bytes=source.migrated_bytes,
            checkpointed_bytes=self.checkpoint_source.checkpointed_bytes,
            kv_reserved_bytes=self.memory.bytes_of_blocks(destination.num_blocks),
        )
