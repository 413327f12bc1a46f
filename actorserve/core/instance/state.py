"""One instance's scheduler: the life of each request on it, and what its engine does next.

The policy (``core.scheduling``) orders the requests. The batcher chooses each iteration's requests anew, and moves KV
between device and host. Blocks that an iteration filled are shared with requests that begin with the same tokens, and
stay cached until their place is needed. An iteration is planned while the one before it runs, and copies run in
parallel to both.

The four participants (``core.participant``) copy KV to and from other instances: requests migrate while they run
(``core.migration``), and are checkpointed in case their worker dies (``core.checkpoints``).
"""

from collections.abc import Iterable, Sequence

from actorserve.core.checkpoints.source import CheckpointSource
from actorserve.core.checkpoints.store import CheckpointStore
from actorserve.core.effects import Drained, Effect, Effects
from actorserve.core.instance.config import InstanceConfig
from actorserve.core.instance.load_report import LoadReporter, make_report
from actorserve.core.instance.operators import InstanceOperators
from actorserve.core.instance.outbox import Outbox
from actorserve.core.instance.parts import InstanceParts
from actorserve.core.instance.quiet_steps import QuietSteps
from actorserve.core.instance.request_life import RequestLife
from actorserve.core.instance.steps import MakePlan, Steps
from actorserve.core.kv.kv_memory import KVMemory
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.kv.layer_groups import Rows
from actorserve.core.messages import (
    LOCAL,
    Command,
    CopyDone,
    CopyFailed,
    Cordon,
    Drain,
    InstanceRole,
    LoadReport,
    MemoryLimit,
    Message,
    Orders,
    Peer,
    PeerDown,
    PeerUp,
    PowerReading,
    Release,
    Role,
    SetCordon,
    SetRole,
    StepDone,
    Tick,
    TransferKind,
    TransferMessage,
    WantReports,
)
from actorserve.core.migration.destination import MigrationDestination
from actorserve.core.migration.source import MigrationSource
from actorserve.core.operations.request_log import RequestLog
from actorserve.core.participant import Handler, Participant, Receiver
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch
from actorserve.core.scheduling.batching import Batcher
from actorserve.core.scheduling.policy import SchedulingPolicy
from actorserve.core.scheduling.token_budget import TokenBudget
from actorserve.core.scheduling.whole_prompts import WholePrompts
from actorserve.core.timing.step_times import StepTimes

_KEEP_AFTER_DEATH_S = 10.0  # checkpoints of a dead worker, until its gateways have noticed and asked for them


class InstanceState:
    """The pure state machine of one instance. ``handle`` never blocks and never fails on what a peer sends."""

    def __init__(
        self,
        config: InstanceConfig,
        policy: SchedulingPolicy,
        times: StepTimes,
        make_plan: MakePlan = Batch.step_plan,
    ) -> None:
        """``policy`` uses the same ``times``. ``make_plan``: for an engine that needs other plans."""
        self.config = config
        self.requests: dict[str, Request] = {}  # waiting or started
        self.policy = policy
        self.times = times
        self._effects = effects = Effects()
        pools = KVPools(config.num_blocks, config.num_host_blocks, config.tokens_per_block, config.bytes_per_block)
        rows = Rows(config.layer_groups, config.tokens_per_block, config.max_chunk_tokens)
        self.checkpoint_store = CheckpointStore(pools, rows, _KEEP_AFTER_DEATH_S, effects)
        self.memory = KVMemory(pools, self.checkpoint_store, effects, rows, prefix_cache=config.prefix_cache)
        self._token_budget = (
            WholePrompts(config.max_batch_tokens, times, config.max_prompt_tokens)
            if config.whole_prompts
            else TokenBudget(config.tpot_target_s, config.max_batch_tokens, times, config.max_prompt_tokens)
        )
        self.batcher = Batcher(
            self.memory,
            policy,
            times,
            self._token_budget,
            mode=config.swap_mode,
            max_batch_requests=config.max_batch_requests,
            max_batch_tokens=config.max_batch_tokens,
            max_tokens=config.max_tokens,
            max_decode_wait_s=config.max_decode_wait_s,
        )
        parts = InstanceParts(config, self.requests, self.memory, policy, times, self.batcher, effects)
        self.steps = Steps(parts, make_plan)
        self.migration_source = MigrationSource(
            config.migration, config.retry_s, self.memory, policy, times, self.requests, self.steps, effects
        )
        self.migration_destination = MigrationDestination(
            config.migration, config.max_tokens, policy.reserves_output, self.memory, self.steps, effects
        )
        self.checkpoint_source = CheckpointSource(
            config.migration.ticket_key, config.checkpoint_tokens, self.memory, self.requests, effects
        )
        self._participants: tuple[Participant, ...] = (
            self.migration_source,
            self.migration_destination,
            self.checkpoint_source,
            self.checkpoint_store,
        )
        receivers: tuple[Receiver, ...] = (self.migration_destination, self.checkpoint_store)
        self._receivers = {receiver.kind: receiver for receiver in receivers}
        self._reporter = LoadReporter(self.load_report, config.load_report_s, effects)
        self._life = RequestLife(
            parts, self.steps, self._participants, self._receivers, self._reporter, self.migration_source.hand_off
        )
        self.quiet_steps = QuietSteps(parts, self.steps, self._participants, self._end_all)
        self.num_stale_messages = 0
        self.cordon = Cordon.OPEN  # what an operator ordered
        self._set_role(config.role)
        self.power: PowerReading | None = None  # the last one
        self._has_drained = False
        self._comes_back = False
        self.log = RequestLog()
        self._operators = InstanceOperators(parts, self.migration_source, self.log)
        self._handlers, self._transfer_handlers = self._make_handlers()

    def _make_handlers(self) -> tuple[dict[type[Message], Handler], dict[tuple[type[Message], TransferKind], Handler]]:
        """The handlers of all messages: by type, and for messages about a transfer by type and kind."""
        handlers: dict[type[Message], Handler] = {
            StepDone: self._on_step_done,
            CopyDone: self._on_copy_ended,
            CopyFailed: self._on_copy_ended,
            MemoryLimit: self._on_memory_limit,
            PowerReading: self._on_power_reading,
            PeerUp: self._on_peer_up,
            PeerDown: self._on_peer_down,
            WantReports: self._on_want_reports,
            Tick: self._on_tick,
            Drain: self._on_drain,
            SetCordon: self._on_set_cordon,
            SetRole: self._on_set_role,
            Command: self._operators.on_command,
            Orders: self._operators.on_orders,
            **self._life.handlers,
        }
        transfer_handlers: dict[tuple[type[Message], TransferKind], Handler] = {}
        for participant in self._participants:
            handlers.update(participant.handlers)
            for message_type, handler in participant.transfer_handlers.items():
                transfer_handlers[message_type, participant.kind] = handler
        return handlers, transfer_handlers

    @property
    def outbox(self) -> Outbox:
        """Requests that ended here, until their gateways release them."""
        return self._life.outbox

    @property
    def compiling(self) -> set[Request]:
        """Requests that wait for their grammars to be compiled."""
        return self._life.compiling

    # --- the shell's calls -------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        """Take one message (local messages have no sender), and return the effects, in order."""
        self.quiet_steps.settle()
        handler = self._handlers.get(type(message))
        if handler is None and isinstance(message, TransferMessage):
            handler = self._transfer_handlers.get((type(message), message.transfer.kind))
        if handler is None or handler(message, sender or LOCAL, now) is False:
            self.num_stale_messages += 1
        for participant in self._participants:
            participant.settle(now)
        self._run_next_step(now)
        self.migration_source.begin_handoffs(now)
        for request_id, what in self.batcher.take_notes():
            self.log.note(request_id, now, what)
        if self._life.is_draining and not self._has_drained and not self.requests and not self.outbox:
            self._has_drained = True
            self._effects.append(Drained(self._comes_back))
        return self._effects.take()

    def handle_quietly(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect] | None:
        """For a simulator whose iterations are quiet (``core.instance.quiet_steps``), and that has advanced them to
        ``now``: take a message that does not concern them. None if the message must be handled.
        """
        match message:
            case Tick() if not self._is_participant_due(now) and not self.quiet_steps.will_grow(now):
                self._reporter.on_tick(now)
                self.outbox.on_tick(now)
            case Release() if message.request_id in self.outbox:
                self._life.on_release(message, sender or LOCAL, now)
            case _:
                return None
        return self._effects.take()

    def next_deadline(self) -> float | None:
        """When to send the next Tick, in seconds on the shell's clock."""
        return _earliest((self.next_deadline_when_quiet(), self.steps.next_plan_s))

    def next_deadline_when_quiet(self) -> float | None:
        """The same for a simulator whose iterations are quiet (``core.instance.quiet_steps``), so that none is planned
        singly.
        """
        deadlines = [participant.next_deadline() for participant in self._participants]
        return _earliest((*deadlines, self._reporter.next_report_s, self.outbox.next_retry_s))

    def _is_participant_due(self, now: float) -> bool:
        deadlines = [participant.next_deadline() for participant in self._participants]
        return any(deadline_s is not None and deadline_s <= now for deadline_s in deadlines)

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold. Tests call it after each event."""
        self._life.validate()
        for participant in self._participants:
            participant.validate()
        self.steps.validate()
        requests = self.requests.values()
        self.memory.validate(requests, self.migration_destination.holdings, self.checkpoint_store.holdings)

    # --- iterations and copies ---------------------------------------------------------------------------------------

    def _run_next_step(self, now: float) -> None:
        steps = self.steps
        if not steps.is_due(now):
            return
        if not self.requests:
            steps.wait()
            self.batcher.rest(now)
            return
        held = steps.look_ahead(now) | self.migration_source.paused | self.compiling
        batch, refused = self.batcher.plan(now, held, is_ahead=bool(steps.in_flight))
        for request in refused:
            request.attained = self.policy.attained(request, now)
            self._life.end(request, now)
        if batch.rows:
            steps.begin(batch, now)

    def _on_step_done(self, done: StepDone, sender: Peer, now: float) -> None:
        has_changed = self.config.report_changes and any(step.batch.num_prompts for step in self.steps.in_flight)
        finished = self.steps.finish(done, now)
        self._end_all(finished, now)
        if has_changed and not finished:
            self._reporter.send()

    def _end_all(self, requests: Sequence[Request], now: float) -> None:
        """An iteration has ended these requests."""
        for request in requests:
            self._life.end(request, now)
        if requests and self.config.report_changes:
            self._reporter.send()

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

    def _on_power_reading(self, message: PowerReading, sender: Peer, now: float) -> None:
        self.power = message
        self.steps.read_power(message, now)

    # --- peers, time and load ----------------------------------------------------------------------------------------

    def _on_peer_up(self, message: PeerUp, sender: Peer, now: float) -> None:
        if message.role is Role.COORDINATOR:
            self._operators.on_coordinator_up(message.peer)
            self._reporter.add_listener(message.peer, now)
        elif message.role is Role.WORKER:
            for participant in self._participants:
                participant.on_peer_up(message.peer, None if message.worker is None else message.worker.kv)

    def _on_peer_down(self, message: PeerDown, sender: Peer, now: float) -> None:
        self._reporter.drop_listener(message.peer)
        self._operators.coordinators.discard(message.peer)
        for participant in self._participants:
            participant.on_peer_down(message.peer, now)
        self._life.on_peer_down(message.peer)

    def _on_want_reports(self, message: WantReports, sender: Peer, now: float) -> None:
        if message.wanted:
            self._reporter.add_listener(sender, now)
        else:
            self._reporter.drop_listener(sender)

    def _on_tick(self, message: Tick, sender: Peer, now: float) -> None:
        self._reporter.on_tick(now)
        self.outbox.on_tick(now)
        for participant in self._participants:
            participant.on_tick(now)

    def _on_drain(self, message: Drain, sender: Peer, now: float) -> None:
        self._life.is_draining = True
        self._comes_back |= message.comes_back
        for participant in self._participants:
            participant.on_drain()
        self._reporter.send()

    def _on_set_cordon(self, message: SetCordon, sender: Peer, now: float) -> None:
        """Requests that were placed or moved here before the order are still taken."""
        self.cordon = message.cordon
        self._reporter.send()

    def _on_set_role(self, message: SetRole, sender: Peer, now: float) -> None:
        """The dispatcher sends other requests from now on."""
        self._set_role(message.role)
        self._reporter.send()

    def _set_role(self, role: InstanceRole) -> None:
        self.role = role
        self._token_budget.prompts_first = role is InstanceRole.PROMPT

    def load_report(self, sequence: int = 0, accepted: tuple[str, ...] = ()) -> LoadReport:
        """The load now. ``accepted`` names the requests that arrived since the last report."""
        order = [request for request in self.batcher.order if self.requests.get(request.request_id) is request]
        if len(order) < len(self.requests):  # some came, or were held, since the last planning
            order = list(dict.fromkeys([*order, *self.requests.values()]))
        return make_report(
            self.memory,
            order,
            self.config.headroom_bytes,
            self.batcher,
            self.migration_source,
            self.migration_destination,
            self.checkpoint_source,
            num_in_batch=self.steps.num_in_batch,
            is_draining=self._life.is_draining,
            cordon=self.cordon,
            role=self.role,
            num_output_tokens=self.steps.num_output_tokens,
            num_by_level=self.policy.num_by_level(),
            power=self.power,
            energy=self.steps.energy,
            profile=self.times.profile,
            sequence=sequence,
            accepted=accepted,
        )


def _earliest(deadlines: Iterable[float | None]) -> float | None:
    return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)
