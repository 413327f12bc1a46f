"""The production cores under a virtual clock: one gateway, the coordinator and the instances of a cluster.

Events lie on a heap by (time, sequence number), so a run depends on its configuration alone. The network takes a fixed
time and keeps the order of each link. A process that is killed loses all, what it sent before still arrives, and its
peers notice after the death watch's time; restarted, it is a new incarnation, which everybody meets.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from actorserve.core.cluster import ClusterConfig, ClusterState
from actorserve.core.effects import (
    AddToEngine,
    Deliver,
    DropFromEngine,
    Effect,
    End,
    RunStep,
    Send,
    SwapIn,
    SwapOut,
)
from actorserve.core.instance import InstanceConfig, InstanceState
from actorserve.core.messages import (
    CopyDone,
    LoadReport,
    Message,
    ModelInfo,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    RequestSpec,
    Role,
    SamplingParams,
    StepPlan,
    Tick,
)
from actorserve.core.policies import make_policy
from actorserve.core.profile import Profile
from actorserve.core.sessions import SessionsConfig, SessionsState
from actorserve.core.step_times import StepTimes
from actorserve.core.swapping import SwapMode
from actorserve.sim.arrivals import arrivals
from actorserve.sim.config import COORDINATOR, ClusterTable, RunConfig
from actorserve.sim.engine_model import TOKEN_ID, EngineModel, Flight
from actorserve.sim.results import Counts, Outcomes, Results
from actorserve.sim.traces import TraceRow
from actorserve.sim.workload import Arrival, Prompts

GATEWAY = "gateway-0"
_PROGRESS_EVERY = 200  # arrivals


class Core(Protocol):
    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...


@dataclass(eq=False)
class Process:
    """One incarnation of a process: its core, whom it has met, and when its next Tick is due."""

    peer: Peer
    role: Role
    core: Core
    engine: EngineModel | None = None
    flight: Flight | None = None
    born_s: float = 0.0
    met: dict[Peer, PeerUp] = field(default_factory=dict)
    tick_at_s: float | None = None
    report: LoadReport | None = None
    kv_used_sum: float = 0.0
    num_reports: int = 0

    @property
    def its_engine(self) -> EngineModel:
        """A worker's."""
        assert self.engine is not None
        return self.engine

    @property
    def its_instance(self) -> InstanceState:
        """A worker's."""
        assert isinstance(self.core, InstanceState)
        return self.core


class Simulation:
    """One run. ``on_progress`` is told the virtual time, and how many requests have come and ended."""

    def __init__(
        self,
        config: RunConfig,
        profile: Profile,
        trace: Sequence[TraceRow] = (),
        on_progress: Callable[[float, int, int], None] = lambda now, arrived, ended: None,
    ) -> None:
        """Raises: SimulationError, WorkloadError."""
        self.now = 0.0
        self.outcomes = Outcomes()
        self.counts = Counts()
        self.processes: dict[str, Process] = {}
        self.config = config
        self._profile = profile
        self._speed = profile.speed()
        self._on_progress = on_progress
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_pushed = 0
        self._num_events = 0
        self._num_failovers = 0
        self._alive_s = 0.0
        self._network_s = config.cluster.network_s
        self._incarnations: dict[str, int] = {}
        self._without_token: set[str] = set()  # only looked up
        self._prompts = Prompts(compared=config.cluster.prefix_cache)
        self._sampling: dict[int, SamplingParams] = {}
        self._arrivals: Iterator[Arrival] = arrivals(config, trace)
        self._next_arrival: Arrival | None = None

    def run(self) -> Results:
        """From the first arrival until the last request has ended, and every instance has reported once more."""
        self._start(COORDINATOR)
        self._start(GATEWAY)
        for number in range(self.config.cluster.instances):
            self._start(f"worker-{number}")
        for failure in self.config.failures:
            self._at(failure.at_s, self._kill, failure.process)
            if failure.restart_at_s is not None:
                self._at(failure.restart_at_s, self._start, failure.process)
        self._expect_arrival()
        heap = self._heap
        while heap and not self._is_over():
            self.now, _, act, arguments = heappop(heap)
            self._num_events += 1
            act(*arguments)
        ended_s = max((at for at in self.outcomes.ended_s if at == at), default=self.now)
        until_s = ended_s + self.config.cluster.load_report_s
        while heap and heap[0][0] <= until_s and not self.outcomes.num_open:
            self.now, _, act, arguments = heappop(heap)
            act(*arguments)
        for process in list(self.processes.values()):
            self._count(process, ended_s)
        self._on_progress(self.now, len(self.outcomes), len(self.outcomes) - self.outcomes.num_open)
        return Results(self.outcomes, self.counts, self._num_failovers, self._num_events, self._alive_s)

    def _is_over(self) -> bool:
        if self._next_arrival is not None:
            return False
        if not self.outcomes.num_open or not self.outcomes.arrived_s:
            return True
        return self.now > self.outcomes.arrived_s[-1] + self.config.drain_limit_s

    # --- events ------------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._num_pushed += 1
        heappush(self._heap, (at_s, self._num_pushed, act, arguments))

    def _expect_arrival(self) -> None:
        self._next_arrival = next(self._arrivals, None)
        if self._next_arrival is not None:
            self._at(max(self.now, self._next_arrival.at_s), self._arrive)

    def _arrive(self) -> None:
        arrival = self._next_arrival
        assert arrival is not None
        outcomes = self.outcomes
        number = outcomes.arrive(self.now, arrival.prompt_tokens, arrival.output_tokens, arrival.priority)
        self._expect_arrival()
        sampling = self._sampling.get(arrival.output_tokens)
        if sampling is None:
            sampling = SamplingParams(seed=0, max_tokens=arrival.output_tokens)
            self._sampling[arrival.output_tokens] = sampling
        prompt = self._prompts.token_ids(arrival, number)
        spec = RequestSpec(str(number), prompt, sampling, priority=arrival.priority)
        self._without_token.add(spec.request_id)
        self._handle(self.processes[GATEWAY], Open(spec))
        if number % _PROGRESS_EVERY == 0:
            self._on_progress(self.now, len(outcomes), len(outcomes) - outcomes.num_open)

    def _arrive_message(self, sender: Peer, to: Peer, message: Message) -> None:
        process = self.processes.get(to.name)
        if process is not None and process.peer == to and sender in process.met:
            self._handle(process, message, sender)

    def _tick(self, process: Process, at_s: float) -> None:
        if process.tick_at_s != at_s or not self._is_alive(process):
            return  # an earlier one was wanted since, or it died
        process.tick_at_s = None
        deadline = process.core.next_deadline()
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
        flight = process.flight
        if flight is not None:
            self._advance(process, flight, flight.num_ended(self.now))
        for effect in process.core.handle(message, self.now, sender):
            self._perform(process, effect)
        if flight is not None and len(flight.ends) > 1:
            num_quiet = self._num_quiet_steps(process)
            if num_quiet + 1 < len(flight.ends):
                del flight.ends[num_quiet + 1 :]
                self._expect_end(process, flight)
        self._expect_tick(process)

    def _perform(self, process: Process, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(process, effect)
            case Deliver(request_id=request_id):
                if request_id in self._without_token:
                    self._without_token.discard(request_id)
                    self.outcomes.first_token_s[int(request_id)] = self.now
            case RunStep(plan=plan):
                self._run_step(process, plan)
            case End(request_id=request_id, reason=reason):
                self._without_token.discard(request_id)
                self.outcomes.end(int(request_id), self.now, reason)
            case SwapOut() | SwapIn():
                done_s, duration_s = process.its_engine.copy(effect, self.now)
                self._at(done_s, self._engine_done, process, CopyDone(effect.copy_id, duration_s))
            case AddToEngine(request=request):
                process.its_engine.add(request)
            case DropFromEngine(request_id=request_id):
                process.its_engine.drop(request_id)

    def _expect_tick(self, process: Process) -> None:
        deadline = process.core.next_deadline()
        if deadline is not None and (process.tick_at_s is None or deadline < process.tick_at_s):
            process.tick_at_s = at_s = max(deadline, self.now)
            self._at(at_s, self._tick, process, at_s)

    def _start(self, name: str) -> None:
        """A new incarnation; everybody alive meets it, and hears of the death of the one before it first."""
        self._incarnations[name] = incarnation = self._incarnations.get(name, 0) + 1
        process = self._make(Peer(name, incarnation))
        self.processes[name] = process
        others = list(self.processes.values())
        if process.role is Role.WORKER:  # workers have nothing to tell each other, and there may be many
            hubs = (self.processes.get(hub) for hub in (COORDINATOR, GATEWAY))
            others = sorted((hub for hub in hubs if hub is not None), key=lambda hub: hub.born_s)
        for other in others:
            if other is process:
                continue
            self._lose(other, Peer(name, incarnation - 1))
            self._meet(other, process)
            self._meet(process, other)

    def _make(self, peer: Peer) -> Process:
        cluster = self.config.cluster
        if peer.name == COORDINATOR:
            core = ClusterState(
                ClusterConfig(
                    cluster.max_waiting_requests,
                    cluster.retry_s,
                    max_queue_per_instance=cluster.max_queue_per_instance,
                    promote_after_s=cluster.promote_after_s,
                    min_share=cluster.min_share,
                )
            )
            return Process(peer, Role.COORDINATOR, core, born_s=self.now)
        if peer.name == GATEWAY:
            sessions = SessionsConfig(cluster.retry_s, cluster.no_instance_timeout_s, cluster.resume_timeout_s)
            return Process(peer, Role.GATEWAY, SessionsState(sessions), born_s=self.now)
        instance = instance_config(cluster, self._profile)
        times = StepTimes(self._profile)
        policy = make_policy(
            cluster.policy, times, promote_after_s=cluster.promote_after_s, min_share=cluster.min_share
        )
        rng = random.Random(f"{self.config.seed} {peer.name} {peer.incarnation}")
        return Process(
            peer,
            Role.WORKER,
            InstanceState(instance, policy, times),
            EngineModel(
                self._profile,
                instance.bytes_per_block,
                rng,
                overhead_s=cluster.step_overhead_s,
                copy_slowdown=cluster.copy_slowdown,
                noise=cluster.noise,
            ),
            born_s=self.now,
        )

    def _meet(self, process: Process, other: Process) -> None:
        model = None
        if other.role is Role.WORKER:
            model = ModelInfo(self._profile.model, 2**31, self.config.cluster.max_tokens)
        kind = "simulated" if other.role is Role.WORKER else ""
        up = process.met[other.peer] = PeerUp(other.peer, other.role, kind, model, self._speed if model else None)
        self._handle(process, up)

    def _lose(self, process: Process, peer: Peer) -> None:
        """Nothing of that incarnation is heard afterwards."""
        if process.met.pop(peer, None) is not None:
            self._handle(process, PeerDown(peer))

    def _kill(self, name: str) -> None:
        """What it sent and nobody read still arrives; what was sent to it is gone."""
        dead = self.processes.pop(name)
        if dead.flight is not None:
            self._advance(dead, dead.flight, dead.flight.num_ended(self.now))
        self._count(dead, self.now)
        for other in self.processes.values():
            if dead.peer in other.met:
                self._at(self.now + self.config.cluster.death_after_s, self._notice_death, other, dead.peer)

    def _notice_death(self, process: Process, dead: Peer) -> None:
        if self._is_alive(process):
            self._lose(process, dead)

    def _count(self, process: Process, until_s: float) -> None:
        """Take over what a process counted in its life."""
        if isinstance(process.core, SessionsState):
            self._num_failovers += process.core.num_failovers
        if process.engine is None:
            return
        self._alive_s += max(0.0, until_s - process.born_s)
        self.counts.busy_s += process.engine.busy_s
        self.counts.num_steps += process.engine.num_steps
        self.counts.num_rows += process.engine.num_rows
        if process.report is not None:
            self.counts.add(process.report)
        if process.num_reports:
            self.counts.kv_used.append(process.kv_used_sum / process.num_reports)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _send(self, process: Process, effect: Send) -> None:
        message = effect.message
        if type(message) is LoadReport and message is not process.report:  # one report goes to several
            process.report = message
            process.num_reports += 1
            used = message.kv_used_bytes / message.kv_total_bytes
            process.kv_used_sum += used
            self.counts.max_kv_used = max(self.counts.max_kv_used, used)
        self._at(self.now + self._network_s, self._arrive_message, process.peer, effect.to, message)

    # --- iterations --------------------------------------------------------------------------------------------------

    def _run_step(self, process: Process, plan: StepPlan) -> None:
        """Begin a step; with those after it in which nothing is decided it makes one event."""
        process.flight = process.its_engine.begin(plan, self._num_quiet_steps(process), self.now)
        self._expect_end(process, process.flight)

    def _num_quiet_steps(self, process: Process) -> int:
        return process.its_instance.num_quiet_steps()

    def _expect_end(self, process: Process, flight: Flight) -> None:
        at_s = flight.ends[-1][0]
        self._at(at_s, self._steps_done, process, flight, at_s)

    def _steps_done(self, process: Process, flight: Flight, at_s: float) -> None:
        if process.flight is not flight or flight.ends[-1][0] != at_s or not self._is_alive(process):
            return  # something came between
        self._advance(process, flight, len(flight.ends) - 1)
        process.flight = None
        self._handle(process, process.its_engine.done(flight))

    def _advance(self, process: Process, flight: Flight, num_steps: int) -> None:
        """Let the core know of quiet steps that have ended."""
        if not num_steps:
            return
        process.its_engine.count(flight, num_steps)
        for effect in process.its_instance.advance(flight.ends[:num_steps], TOKEN_ID):
            if isinstance(effect, RunStep):
                flight.plan = effect.plan  # on its way already
            else:
                self._perform(process, effect)
        del flight.ends[:num_steps]


def instance_config(cluster: ClusterTable, profile: Profile) -> InstanceConfig:
    """An instance's sizes, as its engine and the settings would tell them."""
    return InstanceConfig(
        num_blocks=cluster.num_blocks,
        tokens_per_block=cluster.tokens_per_block,
        bytes_per_block=cluster.tokens_per_block * profile.kv_bytes_per_token,
        max_context_tokens=cluster.max_context_tokens,
        max_batch_requests=cluster.max_batch_requests,
        max_batch_tokens=cluster.max_batch_tokens,
        load_report_s=cluster.load_report_s,
        retry_s=cluster.retry_s,
        tpot_target_s=cluster.tpot_target_s,
        prefix_cache=cluster.prefix_cache,
        num_host_blocks=cluster.num_host_blocks,
        swap_mode=SwapMode(cluster.swap),
    )
