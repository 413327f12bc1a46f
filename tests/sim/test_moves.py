"""Migration, scaling, checkpoints and their measures in simulated clusters."""

import random
from collections import Counter
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from actorserve.core.effects import Deliver, Effect, End
from actorserve.core.instance.steps import Step
from actorserve.core.messages import FinishReason, Peer, RequestSpec, SamplingParams, Start
from actorserve.core.request import Request
from actorserve.core.scheduling.batch import Batch
from actorserve.core.timing.profile import Link
from actorserve.sim.cores import make_instance
from actorserve.sim.engine_model import EngineModel
from actorserve.sim.instance_metrics import fragmentation, room, unmet_demand
from actorserve.sim.results import Outcomes
from actorserve.sim.simulated_process import Process
from actorserve.sim.simulation import Simulation
from tests.sim.profiles import PROFILE
from tests.sim.runs import MOVING, config, run
from tools.simulation.experiment import merged
from tools.simulation.result_files import as_json


class Watched(Simulation):
    """Counts each client's tokens and ends."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__(config(changes), [PROFILE])
        self.num_tokens: Counter[str] = Counter()
        self.num_ends: Counter[str] = Counter()

    def _perform(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            self.num_tokens[effect.request_id] += len(effect.token_ids)
        if isinstance(effect, End):
            assert effect.reason is FinishReason.LENGTH
            self.num_ends[effect.request_id] += 1
        super()._perform(process, effect)

    def check_all_were_served(self) -> None:
        assert set(self.num_ends.values()) == {1}
        assert [self.num_tokens[str(number)] for number in range(len(self.outcomes))] == list(self.outcomes.num_output)


class StepByStep(Simulation):
    """Every step is an event of its own."""

    def _num_quiet_steps(self, process: Process) -> int:
        return 0


FAILURES = [
    {"process": "worker-3", "at_s": 20.0, "restart_at_s": 24.0},
    {"process": "coordinator", "at_s": 40.0, "restart_at_s": 50.0},
    {"process": "worker-1", "at_s": 60.0},
]


@pytest.mark.parametrize("mode", ["live", "blocking", "recompute"])
@pytest.mark.parametrize("policy", ["fcfs", "skip_join_mlfq"])
def test_requests_move_and_lose_nothing(mode: str, policy: str) -> None:
    """However requests move and whichever process dies, each client gets each token once. Equal runs are equal."""
    changes = merged(MOVING, {"cluster": {"migration": {"mode": mode}, "policy": policy}, "failures": FAILURES})
    one, again = Watched(changes), Watched(changes)
    figures = one.run().figures()
    one.check_all_were_served()
    assert figures["migration"]["migrated"] > 0
    assert as_json(figures) == as_json(again.run().figures())


def test_a_live_move_is_shorter_than_a_copy() -> None:
    """Requests pause for a shorter time, as a mean over three seeds, if they decode while their KV is copied."""
    mean_gaps_s = {}
    for mode in ("live", "blocking", "recompute"):
        changes = {"cluster": {"migration": {"mode": mode}}}
        runs = [run(merged(MOVING, {"seed": seed, **changes})).figures()["migration"] for seed in range(3)]
        assert min(each["migrated"] for each in runs) > 100
        mean_gaps_s[mode] = mean(each["gap_s"]["mean"] for each in runs)
    assert mean_gaps_s["live"] < mean_gaps_s["blocking"] < mean_gaps_s["recompute"]


def fastest_copies(migration: dict[str, Any]) -> tuple[float, float]:
    """The greatest speed of the copies of requests that go on decoding, and of those whose requests are paused.

    Requests come to the instances in turn, so that these fill unevenly and requests of both kinds move.
    """
    speeds: dict[bool, list[float]] = {False: [0.0], True: [0.0]}

    class Timed(EngineModel):
        def fetch(
            self, source: EngineModel, num_blocks: int, now: float, *, is_urgent: bool, **options: Any
        ) -> tuple[float, float]:
            done_s, duration_s = super().fetch(source, num_blocks, now, is_urgent=is_urgent, **options)
            speeds[is_urgent].append(num_blocks * self._bytes_per_block / duration_s)
            return done_s, duration_s

    changes = {"cluster": {"dispatch": "round_robin", "migration": migration}}
    Simulation(config(merged(MOVING, changes)), [PROFILE], make_engine=Timed).run()
    return max(speeds[False]), max(speeds[True])


def test_a_pace_holds_copies_back() -> None:
    """A pace bounds the speed of copies of requests that go on decoding, and of no others; a pace above the link's
    speed changes nothing.
    """
    free, wide, paced = map(fastest_copies, ({}, {"bytes_per_s": 1e9}, {"bytes_per_s": 2000.0}))
    assert free == wide
    assert 0.0 < paced[0] <= 2000.0 * (1.0 + 1e-9) < free[0]
    assert paced[1] > 2000.0


def test_instances_know_the_pace() -> None:
    """Source and destination wait for as long as copies take at the pace, so slow copies do not fail."""
    slow = {"run_ahead": False, "migration": {"bytes_per_s": 1000.0}}
    figures = run(merged(MOVING, {"cluster": slow})).figures()["migration"]
    assert figures["migrated"] > 0
    assert figures["failed"] == 0


@pytest.mark.parametrize("failures", [[], FAILURES], ids=["calm", "failures"])
@pytest.mark.parametrize("mode", ["live", "blocking", "recompute"])
@pytest.mark.parametrize(("slowdown", "noise", "overhead_s"), [(0.0, 0.0, 0.0), (0.5, 0.0, 0.05), (0.5, 0.1, 0.05)])
def test_many_steps_in_one_event_are_the_same_with_moves(
    mode: str, slowdown: float, noise: float, overhead_s: float, failures: list[dict[str, Any]]
) -> None:
    """Quiet steps are one event, whatever migrates at the same time, and that changes no time or figure."""
    cluster = {"copy_slowdown": slowdown, "noise": noise, "step_overhead_s": overhead_s}
    few = {"num_requests": 75, "failures": failures}
    changes = merged(MOVING, {"cluster": {"migration": {"mode": mode}, **cluster}, **few})
    together, alone = Simulation(config(changes), [PROFILE]).run(), StepByStep(config(changes), [PROFILE]).run()
    assert together.num_events < alone.num_events
    figures = [results.figures() for results in (together, alone)]
    for each in figures:
        each.pop("events")
    assert figures[0]["migration"]["migrated"] > 0
    assert figures[0] == figures[1]


def test_instances_come_and_go_with_the_load() -> None:
    """A burst starts instances, which are up after their warm-up; afterwards they drain and end."""
    changes = merged(
        MOVING,
        {
            "cluster": {
                "instances": 1,
                "scaling": {
                    "max_workers": 4,
                    "scale_out_below": 30.0,
                    "scale_in_above": 100.0,
                    "hold_s": 2.0,
                    "warm_up_s": 3.0,
                },
            },
            "arrivals": {
                "process": "poisson",
                "cv": None,
                "rate_per_s": 0.1,
                "spike": {"at_s": 30.0, "duration_s": 60.0, "factor": 12.0},
            },
            "num_requests": 110,
        },
    )
    simulation = Watched(changes)
    figures = simulation.run().figures()
    simulation.check_all_were_served()
    assert 1.0 < figures["instances"]["mean"] < 4.0
    assert {name for name in simulation._incarnations if name.startswith("worker")} >= {"worker-0", "worker-1"}
    assert len([process for process in simulation.processes.values() if process.engine is not None]) < 4
    lasted_s = max(simulation.outcomes.ended_s)
    assert figures["instances"]["seconds"] == pytest.approx(figures["instances"]["mean"] * lasted_s)
    assert figures["recovery_s"] is not None


def test_an_instance_costs_from_when_it_was_ordered() -> None:
    """The cost includes an instance's warm-up, even if the instance never serves a request."""
    scaling = {"max_workers": 2, "min_workers": 2, "hold_s": 1.0, "warm_up_s": 1000.0}
    results = run({"cluster": {"scaling": scaling}})
    ended_s = results.outcomes.ended_s[0]
    assert ended_s < results.alive_s < 2 * ended_s


def test_preemption_loss_is_from_the_preemption_to_the_next_token() -> None:
    """Of two requests that outgrow the memory the later one is preempted once. It loses the remaining time of the first
    one, and its own prefill.
    """
    results = run(
        {
            "num_requests": 2,
            "cluster": {"kv_tokens": 40, "swap": "recompute", "run_ahead": False},
            "arrivals": {"rate_per_s": 100.0},
            "lengths": {"prompt": 11, "output": 20},
        }
    )
    outcomes = results.outcomes
    assert list(outcomes.num_preempted) == [0, 1]
    assert outcomes.preempted_s[0] == 0.0
    # Each has five of ten blocks, for 20 tokens. So the first request's tenth token takes the blocks of the second one,
    # which has made nine tokens. After ten more tokens the second request computes its 20 tokens again.
    assert outcomes.preempted_s[1] == pytest.approx(10 * 0.5 + PROFILE.prefill_s(20))
    figures = results.figures()
    assert figures["preemption"]["requests_share"] == 0.5
    assert figures["latency"]["preempted_s"]["max"] == outcomes.preempted_s[1]
    e2e_s = sum(ended_s - came_s for came_s, ended_s in zip(outcomes.arrived_s, outcomes.ended_s, strict=True))
    assert figures["preemption"]["share_of_e2e"] == pytest.approx(outcomes.preempted_s[1] / e2e_s)


def test_copies_take_turns_on_their_links() -> None:
    """A copy waits for earlier copies at both ends. An urgent copy waits only for urgent copies, and later copies wait
    for it. A pace delays all copies except urgent ones.
    """
    rng = random.Random(0)
    one, two, other = (
        EngineModel(PROFILE, 4000, rng, costs=PROFILE, pause_s=0.0, copy_slowdown=0.0, noise=0.0, run_ahead=True)
        for _ in range(3)
    )

    def done_s(to: EngineModel, source: EngineModel, *, is_urgent: bool = False, budget: float | None = None) -> float:
        return to.fetch(source, 1, 0.0, bytes_per_s=budget, is_urgent=is_urgent)[0]

    copy_s = 0.65
    assert done_s(one, two) == pytest.approx(copy_s)
    assert done_s(one, other) == pytest.approx(2 * copy_s)
    assert done_s(other, two) == pytest.approx(3 * copy_s)
    assert done_s(one, two, is_urgent=True) == pytest.approx(copy_s)
    assert done_s(one, other, is_urgent=True, budget=1.0) == pytest.approx(2 * copy_s)
    assert done_s(one, two) == pytest.approx(5 * copy_s)  # behind all earlier copies, the urgent included
    assert done_s(two, one, budget=100.0) == pytest.approx(40.0)
    assert done_s(two, one, budget=100.0) == pytest.approx(80.0)
    assert done_s(two, other, budget=100.0) == pytest.approx(40.0)


def test_copies_into_host_memory_slow_the_source_alone() -> None:
    """A concurrent copy lengthens an iteration if the copy reads or writes the device's memory."""
    rng = random.Random(0)
    cluster = config().cluster
    steps = make_instance(cluster, cluster.all_groups[0], PROFILE).steps

    def model() -> EngineModel:
        return EngineModel(PROFILE, 4000, rng, costs=PROFILE, pause_s=0.0, copy_slowdown=1.0, noise=0.0, run_ahead=True)

    def step_s(engine: EngineModel) -> float:
        request = Request(RequestSpec("r", (1,), SamplingParams(seed=0, max_tokens=1)), 1, Peer("gateway-0", 1))
        step = Step(0, Batch([(request, 1)], None), [0], [True], [[0]])
        return engine.begin(step, 0, 0.0, None, steps).ends[0][1]

    for into_host in (False, True):
        source, destination, bystander = model(), model(), model()
        destination.fetch(source, 100, 0.0, bytes_per_s=None, is_urgent=False, into_host=into_host)
        assert step_s(source) == 2 * step_s(bystander)
        assert step_s(destination) == step_s(bystander) * (1 if into_host else 2)


@pytest.mark.parametrize("slowdown", [0.0, 0.5])
def test_checkpoints_lose_nothing(slowdown: float) -> None:
    """With checkpoints each client gets each token once, whatever dies. Equal runs are equal."""
    changes = merged(
        MOVING,
        {
            "cluster": {"migration": {"checkpoint_tokens": 4}, "host_kv_tokens": 2000, "copy_slowdown": slowdown},
            "failures": FAILURES,
        },
    )
    one, again = Watched(changes), Watched(changes)
    figures = one.run().figures()
    one.check_all_were_served()
    assert figures["checkpoints"]["bytes"] > 0
    assert as_json(figures) == as_json(again.run().figures())


def test_a_death_costs_a_copy_with_checkpoints() -> None:
    """A request whose instance dies goes on elsewhere from its checkpoint, and its KV is not computed again."""
    fast = replace(PROFILE, swap=Link(0.0, 1e9), transfer=Link(0.0, 1e9))
    ended_s = []
    for checkpoint_tokens in (0, 4):
        changes = {
            "cluster": {
                "instances": 2,
                "host_kv_tokens": 2000,
                "migration": {"checkpoint_tokens": checkpoint_tokens},
            },
            "lengths": {"prompt": 100, "output": 60},
            "failures": [{"process": "worker-1", "at_s": 30.0}],
        }
        results = run(changes, fast)
        assert results.num_failovers == 1
        ended_s.append(results.outcomes.ended_s[0])
    without, with_checkpoints = ended_s
    assert with_checkpoints < without - 0.9 * PROFILE.prefill_s(100)


def test_recovery_is_when_all_have_a_first_token() -> None:
    """Recovery lasts from the spike's end to the last first token of the requests that arrived before it, whatever
    later requests get.
    """
    outcomes = Outcomes()
    for at_s, ttft_s in ((1.0, 9.5), (8.0, 9.0), (9.0, 1.0), (10.5, 90.0), (12.0, 0.1)):
        number = outcomes.arrive(at_s, 1, 1, 0)
        outcomes.first_token_s[number] = at_s + ttft_s
    assert outcomes.recovery_s(7.0) == 3.5
    assert outcomes.recovery_s(10.0) == 7.0
    outcomes.arrive(10.0, 1, 1, 0)
    assert outcomes.recovery_s(10.0) is None
    assert outcomes.recovery_s(9.5) == 7.5


def test_fragmentation_is_free_memory_that_lies_apart() -> None:
    """A request that fits only into two instances' free memory together makes its size fragmented. A request that
    fits nowhere, or into one instance, makes none.
    """
    cluster = config({"cluster": {"kv_tokens": 40}}).cluster
    instances = [make_instance(cluster, cluster.all_groups[0], PROFILE) for _ in range(2)]
    for number, instance in enumerate(instances):
        spec = RequestSpec(f"r{number}", (0,) * 20, SamplingParams(seed=0, max_tokens=9))
        instance.handle(Start(1, spec), 0.0, Peer("gateway-0", 1))
        assert room(instance) == 4  # of ten blocks five are used, and the running request may soon need one more
    assert fragmentation(instances, [6]) == 6 / 20
    assert fragmentation(instances, [6, 6]) == 6 / 20
    assert fragmentation(instances, [11]) == 0.0
    assert fragmentation(instances, [], [6]) == 6 / 20
    assert fragmentation(instances, [], [4]) == 0.0
    waits = RequestSpec("r2", (0,) * 24, SamplingParams(seed=0, max_tokens=9))
    assert unmet_demand(instances[0]) == 0
    instances[0].handle(Start(1, waits), 0.0, Peer("gateway-0", 1))
    assert unmet_demand(instances[0]) == 6
