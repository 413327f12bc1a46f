"""The production cores under a virtual clock: one gateway, the coordinator and the instances of a cluster.

Events are ordered by (time, sequence number), so a run depends on its configuration alone. The network takes a fixed
time and keeps the order of each link. A process that is killed loses its state; its earlier messages still arrive, and
its peers notice its death after the death watch's time. A restarted process is a new incarnation. Two workers meet a
round trip after one of them asks for it. A new worker is up after its warm-up, and a drained one says goodbye.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from actorserve.core.effects import (
    Deliver,
    Drained,
    Effect,
    End,
    Fetch,
    Meet,
    RunStep,
    Send,
    StartWorker,
    SwapIn,
    SwapOut,
)
from actorserve.core.gateway.state import GatewayState
from actorserve.core.messages import (
    CopyDone,
    CopyFailed,
    HandOver,
    InstanceRole,
    LoadReport,
    Message,
    Offer,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    PowerReading,
    Release,
    Role,
    SetPowerCaps,
    Stage,
    Tick,
)
from actorserve.core.timing.profile import Profile
from actorserve.sim.clients import Clients
from actorserve.sim.config import COORDINATOR, RunConfig
from actorserve.sim.cores import make_coordinator, make_gateway, make_instance
from actorserve.sim.engine_model import TOKEN_ID, EngineModel, Flight
from actorserve.sim.instance_metrics import Interruptions, blocks_in_line
from actorserve.sim.links.following import FollowingCopies
from actorserve.sim.links.links import make_links
from actorserve.sim.machines.machines import Machines
from actorserve.sim.measures.token_gaps import TokenGaps
from actorserve.sim.power.actuator import ACTUATOR, REPORT_S
from actorserve.sim.results import Counts, Outcomes, Results
from actorserve.sim.simulated_process import Process, process_access, sampled_fragmentation
from actorserve.sim.timeline import Timeline
from actorserve.sim.workload.traces import TraceRow

GATEWAY = "gateway-0"
_SAMPLE_S = 1.0  # time between two samples of the memory's fragmentation


class Simulation:
    """One run. ``on_progress`` is called with the virtual time, and how many requests have arrived and ended.

    ``make_engine`` gets what ``EngineModel`` gets, and makes the engine of each instance.
    """

    def __init__(
        self,
        config: RunConfig,
        profiles: Sequence[Profile],
        trace: Sequence[TraceRow] = (),
        on_progress: Callable[[float, int, int], None] = lambda now, arrived, ended: None,
        make_engine: Callable[..., EngineModel] = EngineModel,
    ) -> None:
        """``profiles``: of the cluster's groups, in their order. Raises: SimulationError, WorkloadError."""
        self._make_engine = make_engine
        self._timeline = Timeline()
        self._clients = Clients(config, trace, self._timeline, self._send_request, on_progress)
        self.counts = Counts()
        self.processes: dict[str, Process] = {}
        self.config = config
        make = partial(make_links, config.cluster.links, self._timeline)
        self._links = FollowingCopies(self._timeline, make, self._fetched)
        self._machines = Machines(config, profiles)
        self._num_events = 0
        self._num_failovers = 0
        self._interruptions = Interruptions()
        self._token_gaps = TokenGaps()
        self._fragmentation: list[float] = []
        self._ordered_s: dict[str, float] = {}  # when each worker that is warming up was ordered
        self._network_s = config.cluster.network_s
        self._incarnations: dict[str, int] = {}

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def outcomes(self) -> Outcomes:
        return self._clients.outcomes

    def run(self) -> Results:
        """Run from the first arrival until the last request has ended and every instance has reported once more."""
        self._start(COORDINATOR)
        self._start(GATEWAY)
        for number in range(self.config.cluster.num_workers):
            self._start(f"worker-{number}")
        for failure in self.config.failures:
            self._at(failure.at_s, self._kill, failure.process, failure.restart_at_s)
        if self.config.cluster.power.budget is not None:
            self._read_power()
        self._clients.expect_arrival()
        self._sample()
        timeline = self._timeline
        while timeline.next_s is not None and not self._is_over():
            self._num_events += 1
            timeline.run_next()
        ended_s = max((at for at in self.outcomes.ended_s if at == at), default=self.now)
        until_s = ended_s + self.config.cluster.load_report_s
        while (next_s := timeline.next_s) is not None and next_s <= until_s and not self.outcomes.num_open:
            timeline.run_next()
        for process in list(self.processes.values()):
            self._count(process, ended_s)
        for name, ordered_s in self._ordered_s.items():
            self._machines.lifetimes_s[self._machines.group_of(name)] += max(0.0, ended_s - ordered_s)
        self._clients.tell_progress()
        return Results(
            self.outcomes,
            self.counts,
            self._num_failovers,
            self._num_events,
            self._machines.lifetimes_s,
            self._interruptions.moved,
            self._fragmentation,
            self.config.arrivals.spike,
            self._token_gaps.gaps,
            self._machines.occupancies,
            self._machines.energies,
        )

    def _is_over(self) -> bool:
        if self._clients.have_more:
            return False
        if not self.outcomes.num_open or not self.outcomes.arrived_s:
            return True
        return self.now > self.outcomes.arrived_s[-1] + self.config.drain_limit_s

    # --- events ------------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._timeline.at(at_s, act, *arguments)

    def _send_request(self, request: Open) -> None:
        self._handle(self.processes[GATEWAY], request)

    def _arrive_message(self, sender: Peer, to: Peer, message: Message) -> None:
        process = self.processes.get(to.name)
        if isinstance(message, SetPowerCaps):
            self._set_caps(message)
        elif process is not None and process.peer == to and sender in process.met:
            self._handle(process, message, sender)

    def _tick(self, process: Process, at_s: float) -> None:
        if process.tick_at_s != at_s or not self._is_alive(process):
            return  # an earlier tick replaced this one, or the process died
        process.tick_at_s = None
        deadline = process.next_deadline()
        if deadline is not None and deadline <= at_s:
            self._handle(process, Tick())
        else:
            self._expect_tick(process)

    def _engine_done(self, process: Process, message: Message) -> None:
        if self._is_alive(process):
            self._handle(process, message)

    def _is_alive(self, process: Process) -> bool:
        return self.processes.get(process.peer.name) is process

    # --- processes ---------------------------------------------------------------------------------------------------

    def _handle(self, process: Process, message: Message, sender: Peer | None = None) -> None:
        if isinstance(message, Tick | Release) and self._handle_quietly(process, message, sender):
            return
        self._catch_up(process)
        effects = process.core.handle(message, self.now, sender)
        if process.engine is not None:
            self._look_for_preemptions(process)
        for effect in effects:
            self._perform(process, effect)
        if not self._is_alive(process):
            return  # it has drained
        flight = process.quiet_flight
        if flight is not None and flight.cut(self._num_quiet_steps(process)):
            self._expect_end(process, flight)
        self._expect_tick(process)

    def _handle_quietly(self, process: Process, message: Message, sender: Peer | None) -> bool:
        """Have the core take a message that does not concern its quiet steps. False if the message does."""
        self._advance_to_now(process)
        core = process.worker_core if process.quiet_flight else None
        effects = None if core is None else core.handle_quietly(message, self.now, sender)
        for effect in effects or ():
            self._perform(process, effect)
        if effects is not None:
            self._expect_tick(process)
        return effects is not None

    def _perform(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(process, effect)
            case Deliver(request_id=request_id):
                self._clients.on_token(request_id)
            case RunStep():
                self._run_step(process, self.now)
            case End(request_id=request_id, reason=reason):
                self._lose_time(request_id)
                self._token_gaps.on_end(request_id)
                self._clients.on_end(request_id, reason)
            case SwapOut() | SwapIn():
                done_s, duration_s = process.worker_engine.copy(effect, self.now)
                self._at(done_s, self._engine_done, process, CopyDone(effect.copy_id, duration_s))
            case Fetch():
                self._fetch(process, effect)
            case Meet(peer=peer):
                self._at(self.now + 2 * self._network_s, self._introduce, process, peer)
            case StartWorker(role=role):
                self._order_worker(role)
            case Drained():
                self._end(process, self._network_s)

    def _expect_tick(self, process: Process) -> None:
        deadline = process.next_deadline()
        if deadline is not None and (process.tick_at_s is None or deadline < process.tick_at_s):
            process.tick_at_s = at_s = max(deadline, self.now)
            self._at(at_s, self._tick, process, at_s)

    def _start(self, name: str) -> None:
        """Start a new incarnation. Its peers first hear of the old incarnation's death, and then meet the new one."""
        self._incarnations[name] = incarnation = self._incarnations.get(name, 0) + 1
        process = self._make(Peer(name, incarnation), self._ordered_s.pop(name, self.now))
        self.processes[name] = process
        others = list(self.processes.values())
        if incarnation > 1:
            for other in others:
                self._lose(other, Peer(name, incarnation - 1))
        if process.role is Role.WORKER:  # two workers meet only when one of them asks for it
            hubs = (self.processes.get(hub) for hub in (COORDINATOR, GATEWAY))
            others = sorted((hub for hub in hubs if hub is not None), key=lambda hub: hub.born_s)
        for other in others:
            if other is process:
                continue
            self._meet(other, process)
            self._meet(process, other)
        if process.role is Role.WORKER and self.config.cluster.power.budget is not None:
            self._handle(process, PowerReading(device=name))

    def _make(self, peer: Peer, born_s: float) -> Process:
        cluster = self.config.cluster
        if peer.name == COORDINATOR:
            return Process(peer, Role.COORDINATOR, make_coordinator(cluster), born_s=born_s)
        if peer.name == GATEWAY:
            return Process(peer, Role.GATEWAY, make_gateway(cluster), born_s=born_s)
        core = make_instance(cluster, self._machines.group_of(peer.name), self._machines.profile_of(peer.name))
        engine = self._machines.engine(peer, self._make_engine, born_s)
        return Process(peer, Role.WORKER, core, engine, born_s=born_s)

    def _meet(self, process: Process, other: Process) -> None:
        worker = None
        if other.role is Role.WORKER:
            worker = replace(self._machines.info_of(other.peer.name), kv=process_access(other.peer))
        up = PeerUp(other.peer, other.role, worker)
        process.met[other.peer] = up
        self._handle(process, up)

    def _introduce(self, process: Process, peer: Peer) -> None:
        other = self.processes.get(peer.name)
        if other is None or other.peer != peer or not self._is_alive(process) or peer in process.met:
            return
        self._meet(other, process)
        self._meet(process, other)

    def _lose(self, process: Process, peer: Peer) -> None:
        """``process`` notices the death of ``peer``, and gets no messages from that incarnation afterwards."""
        if process.met.pop(peer, None) is not None:
            self._handle(process, PeerDown(peer))

    def _kill(self, name: str, restart_at_s: float | None) -> None:
        """Messages that the process sent still arrive; messages to it are lost."""
        dead = self.processes.get(name)
        if dead is None:
            return  # it has drained
        if dead.engine is not None:
            self._advance_to_now(dead)
            self._settle(dead)
        self._end(dead, self.config.cluster.death_after_s)
        if dead.engine is not None:
            for request_id in dead.worker_core.requests:
                self._lose_time(request_id)
        if restart_at_s is not None:
            self._at(restart_at_s, self._start, name)

    def _end(self, process: Process, notice_s: float) -> None:
        """Remove the process. Processes that have met it notice after ``notice_s``."""
        del self.processes[process.peer.name]
        self._token_gaps.on_lost(process.peer)
        self._count(process, self.now)
        for other in self.processes.values():
            if process.peer in other.met:
                self._at(self.now + notice_s, self._notice_death, other, process.peer)

    def _order_worker(self, role: InstanceRole | None) -> None:
        name = self._machines.order(role)
        self._ordered_s[name] = self.now
        self._at(self.now + self.config.cluster.scaling.warm_up_s, self._start, name)

    def _notice_death(self, process: Process, dead: Peer) -> None:
        if self._is_alive(process):
            self._lose(process, dead)

    def _count(self, process: Process, until_s: float) -> None:
        """Add the counts of a process's whole life."""
        if isinstance(process.core, GatewayState):
            self._num_failovers += process.core.counts.num_failovers
        if process.engine is None:
            return
        self._machines.count(process, until_s)
        process.add_to(self.counts)

    # --- power -------------------------------------------------------------------------------------------------------

    def _read_power(self) -> None:
        """The actuator reads all machines, and reports to the coordinator."""
        coordinator = self.processes.get(COORDINATOR)
        if coordinator is not None:
            if ACTUATOR not in coordinator.met:
                up = coordinator.met[ACTUATOR] = PeerUp(ACTUATOR, Role.POWER)
                self._handle(coordinator, up)
            report = self._machines.read(self.processes)
            self._at(self.now + self._network_s, self._arrive_message, ACTUATOR, coordinator.peer, report)
        self._at(self.now + REPORT_S, self._read_power)

    def _set_caps(self, message: SetPowerCaps) -> None:
        """The actuator sets these caps. The step in flight keeps its time."""
        for process, cap_watts in self._machines.capped(message, self.processes):
            self._forget_prediction(process)
            self._machines.set_cap(process, cap_watts, self.now)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _send(self, process: Process, effect: Send) -> None:
        message = effect.message
        if type(message) is LoadReport and message is not process.report:  # one report goes to several peers
            process.report = message
            process.num_reports += 1
            used = message.kv_used_bytes / message.kv_total_bytes
            process.kv_used_sum += used
            self.counts.max_kv_used = max(self.counts.max_kv_used, used)
        if isinstance(message, Offer | Stage | HandOver):
            self._interruptions.on_send(process.peer, message, process.pause_s(message, self.now))
        self._at(self.now + self._network_s, self._arrive_message, process.peer, effect.to, message)

    def _fetch(self, process: Process, effect: Fetch) -> None:
        """Copy from another instance. The copy fails if its source has died by the end."""
        source = self.processes.get(effect.source.name)
        if source is None or source.peer != effect.source:
            self._at(self.now + self._network_s, self._engine_done, process, CopyFailed(effect.copy_id))
            return
        if self.config.cluster.copy_slowdown:
            for slowed in (source,) if effect.into_host else (source, process):
                self._forget_prediction(slowed)
        self._links.begin(effect, source, process)

    def _fetched(self, process: Process, source: Process, done: CopyDone) -> None:
        self._engine_done(process, done if self._is_alive(source) else CopyFailed(done.copy_id))

    # --- what clients do not see -------------------------------------------------------------------------------------

    def _look_for_preemptions(self, process: Process) -> None:
        instance = process.worker_core
        num_preemptions = instance.batcher.num_preemptions
        if num_preemptions != process.num_preemptions:
            process.num_preemptions = num_preemptions
            for request_id in self._interruptions.on_preemptions(instance, self.now):
                self.outcomes.num_preempted[int(request_id)] += 1

    def _lose_time(self, request_id: str) -> None:
        self.outcomes.preempted_s[int(request_id)] += self._interruptions.on_lost(request_id, self.now)

    def _sample(self) -> None:
        """Sample how fragmented the memory is, once per ``_SAMPLE_S`` as long as requests arrive."""
        workers = [process for process in self.processes.values() if process.engine is not None]
        coordinator = self.processes.get(COORDINATOR)
        in_line = blocks_in_line(coordinator and coordinator.core, len(workers), self.config.cluster.tokens_per_block)
        self._fragmentation.append(sampled_fragmentation(workers, in_line, self._advance_to_now))
        if self._clients.have_more:
            self._at(self.now + _SAMPLE_S, self._sample)

    # --- iterations --------------------------------------------------------------------------------------------------

    def _run_step(self, process: Process, planned_s: float) -> None:
        """Begin a step. The quiet steps after it, in which nothing is decided, are one event."""
        core = process.worker_core
        num_quiet, step = self._num_quiet_steps(process), core.steps.in_flight[-1]
        endings = core.quiet_steps.endings() if num_quiet else ()
        flight = process.worker_engine.begin(step, num_quiet, planned_s, process.newest_flight, core.steps, endings)
        process.flights.append(flight)
        self._expect_end(process, flight)
        for request_id, lost_s in self._interruptions.on_step(step, *flight.ends[0]):
            self.outcomes.preempted_s[int(request_id)] += lost_s

    def _num_quiet_steps(self, process: Process) -> int:
        return process.worker_core.quiet_steps.count()

    def _expect_end(self, process: Process, flight: Flight) -> None:
        at_s = flight.next_event_s
        if flight.event_s != at_s:
            flight.event_s = at_s
            self._at(at_s, self._steps_ended, process, flight, at_s)

    def _steps_ended(self, process: Process, flight: Flight, at_s: float) -> None:
        if flight.event_s != at_s or flight not in process.flights or not self._is_alive(process):
            return  # a message came in between
        flight.event_s = None
        if flight.is_quiet:
            if flight.num_ended(at_s) == len(flight.ends) - 1:
                process.worker_engine.predict_more(flight)
            if flight.next_event_s <= at_s:
                self._advance_to_now(process)
            self._expect_end(process, flight)
            self._expect_tick(process)
        elif flight.ends[0][0] > at_s:
            self._expect_end(process, flight)
        else:
            process.flights.remove(flight)
            done = process.worker_engine.done(flight, process.worker_core.steps.in_flight[0])
            self._token_gaps.on_iterations(process.peer, done.request_ids, (at_s,))
            self._handle(process, done)

    def _catch_up(self, process: Process) -> None:
        """Bring a core whose steps are quiet to now: some have ended, and the next one may have been planned."""
        flight = process.quiet_flight
        if flight is None:
            return
        self._advance_to_now(process)
        planned_s = process.worker_core.quiet_steps.next_plan_s
        if flight.is_quiet and planned_s is not None and planned_s < self.now:
            self._stop_prediction(process, flight)
            for effect in process.core.handle(Tick(), planned_s):
                if isinstance(effect, RunStep):
                    self._run_step(process, planned_s)
                else:
                    self._perform(process, effect)

    def _forget_prediction(self, process: Process) -> None:
        """The predicted durations no longer hold for steps that are planned from now on."""
        self._catch_up(process)
        if (flight := process.quiet_flight) is not None:
            self._stop_prediction(process, flight)
        self._expect_tick(process)

    def _stop_prediction(self, process: Process, flight: Flight) -> None:
        """From the step in flight on, each step is an event of its own."""
        flight.cut(0)
        self._settle(process)
        self._expect_end(process, flight)

    def _advance_to_now(self, process: Process) -> None:
        """Tell the core about quiet steps that have ended."""
        flight = process.quiet_flight
        num_steps = 0 if flight is None else flight.num_ended(self.now)
        if flight is None or not num_steps:
            return
        process.worker_engine.count(flight, num_steps, len(flight.request_ids))
        ends = flight.ends[:num_steps]
        self._token_gaps.on_iterations(process.peer, flight.request_ids, [end_s for end_s, _ in ends])
        flight.drop(num_steps)
        for effect in process.worker_core.quiet_steps.advance(ends, TOKEN_ID):
            self._perform(process, effect)
        if not flight.is_quiet:
            self._settle(process)

    def _settle(self, process: Process) -> None:
        """The core's requests learn of the quiet steps that have ended."""
        for effect in process.worker_core.quiet_steps.stop():
            self._perform(process, effect)
