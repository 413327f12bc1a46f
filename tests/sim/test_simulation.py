"""The production cores under the virtual clock: exact times, equal bytes, and nothing lost when processes die."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, Effect, End
from actorserve.core.messages import FinishReason
from actorserve.core.scheduling.policies import POLICIES
from actorserve.sim.config import ArrivalsTable, LengthsTable
from actorserve.sim.engine_model import EngineModel, Flight
from actorserve.sim.results import Outcomes
from actorserve.sim.simulated_process import Process
from actorserve.sim.simulation import Simulation
from actorserve.sim.workload.traces import TraceRow
from tests.sim.profiles import PROFILE
from tests.sim.runs import NETWORK_S, config, run
from tools.simulation.result_files import as_json

ASKING_S = 3 * NETWORK_S  # place, placed, start


def times(outcomes: Outcomes) -> list[tuple[float, float]]:
    """TTFT and E2E of each request."""
    return [
        (first - came, ended - came)
        for came, first, ended in zip(outcomes.arrived_s, outcomes.first_token_s, outcomes.ended_s, strict=True)
    ]


def test_one_request_takes_what_the_profile_says() -> None:
    """TTFT is the network time to the worker and back, plus the prefill; each further token takes one iteration."""
    results = run()
    ((ttft_s, e2e_s),) = times(results.outcomes)
    assert ttft_s == pytest.approx(ASKING_S + 2.0 + NETWORK_S)
    assert e2e_s == pytest.approx(ttft_s + 3 * 0.5)
    figures = results.figures()
    assert figures["latency"]["per_token_s"]["mean"] == pytest.approx(e2e_s / 4)
    assert figures["latency"]["tpot_s"]["p99"] == pytest.approx(0.5)
    assert figures["steps"] == 4
    assert figures["utilisation"]["busy"] == pytest.approx(3.5 / results.alive_s)


def test_a_batch_of_one_serves_one_after_the_other() -> None:
    """With room for one request in the batch, first come first served makes the second wait for all of the first."""
    results = run({"num_requests": 2, "cluster": {"max_batch_requests": 1}, "arrivals": {"rate_per_s": 2.0}})
    first, second = times(results.outcomes)
    assert first[1] == pytest.approx(ASKING_S + 3.5 + NETWORK_S)
    assert second[0] == pytest.approx(ASKING_S + 3.5 - 0.5 + 2.0 + NETWORK_S)
    assert second[1] == pytest.approx(second[0] + 1.5)


def test_a_prefill_shares_its_iteration_with_decodes() -> None:
    """A prompt that comes while another request decodes is prefilled in the next iteration, and both go on together."""
    results = run({"num_requests": 2, "arrivals": {"rate_per_s": 0.5}, "lengths": {"output": 3}})
    first, second = times(results.outcomes)
    # The first prefill ends when the second request arrives, 0.03 s before that reaches the worker. So one decode runs
    # in between.
    # The shared iteration adds the prefill's time beyond reading the weights, and the decode's, which is 0.
    joint_s = PROFILE.step_s([(11, 0)], 1, 13)
    assert first[0] == pytest.approx(ASKING_S + 2.0 + NETWORK_S)
    assert second[0] == pytest.approx(0.5 + ASKING_S + joint_s + NETWORK_S)
    assert first[1] == pytest.approx(first[0] + 0.5 + joint_s)


def test_whole_prompts_are_not_cut() -> None:
    """A prompt over the limit takes two iterations, or with ``whole_prompts`` one."""
    ttft_s = {}
    for whole_prompts in (False, True):
        cluster = {"whole_prompts": whole_prompts, "max_batch_tokens": 40, "max_batch_requests": 8}
        results = run({"cluster": cluster, "lengths": {"prompt": 60}})
        ((ttft_s[whole_prompts], _),) = times(results.outcomes)
    around_s = ASKING_S + NETWORK_S
    assert ttft_s[False] == pytest.approx(around_s + PROFILE.prefill_s(40) + PROFILE.prefill_s(20, 40))
    assert ttft_s[True] == pytest.approx(around_s + PROFILE.prefill_s(60))


def test_dispatch_knows_queues_as_they_are() -> None:
    """With ``report_changes`` the dispatcher hears of a request's end long before the next regular report."""
    rows = [TraceRow(0.0, 20, 60), TraceRow(0.0, 60, 1), TraceRow(25.0, 11, 1)]
    ttft_s = {}
    for report_changes in (False, True):
        cluster = {
            "instances": 2,
            "dispatch": "shortest_queue",
            "late_binding": False,
            "load_report_s": 1000.0,
            "report_changes": report_changes,
        }
        of_trace = {"arrivals": ArrivalsTable(process="trace"), "lengths": LengthsTable(like="trace")}
        chosen = config({"num_requests": 3, "cluster": cluster}).model_copy(update={"trace": "rows", **of_trace})
        results = Simulation(chosen, (PROFILE,), rows).run()
        ttft_s[report_changes] = times(results.outcomes)[2][0]
    assert ttft_s[True] == pytest.approx(ASKING_S + PROFILE.prefill_s(11) + NETWORK_S)  # where the second one has ended
    assert ttft_s[False] > ttft_s[True] + 0.1  # beside the first one, which decodes


def test_overhead_lies_between_iterations() -> None:
    """The overhead delays each iteration, and does not count as the engine's busy time."""
    plain, slow = (run({"cluster": {"run_ahead": False, "step_overhead_s": pause_s}}) for pause_s in (0.0, 0.125))
    assert times(slow.outcomes)[0][1] == pytest.approx(times(plain.outcomes)[0][1] + 4 * 0.125)
    assert slow.counts.busy_s == plain.counts.busy_s


def test_the_overhead_is_the_profiles_by_default() -> None:
    """Without an overhead of the experiment, each iteration waits for the profile's pause, which grows with its
    requests.
    """
    slow = replace(PROFILE, pause_s=0.1, pause_row_s=0.025)
    at_once = {"num_requests": 2, "cluster": {"run_ahead": False}, "arrivals": {"rate_per_s": 1e6}}
    ended_s = [max(run(at_once, profile).outcomes.ended_s) for profile in (PROFILE, slow)]
    # The first request's prefill is alone. Then one decodes while the other is prefilled, and both decode.
    assert ended_s[1] == pytest.approx(ended_s[0] + 0.125 + 4 * 0.15 - 0.025)
    changed = {**at_once, "cluster": {"run_ahead": False, "step_overhead_s": 0.0}}
    assert max(run(changed, slow).outcomes.ended_s) == ended_s[0]


def test_running_ahead_hides_the_overhead() -> None:
    """An iteration that was planned while the one before it ran begins when that one ends; the first one waits."""
    plain, slow = run(), run({"cluster": {"step_overhead_s": 0.025}})
    assert times(slow.outcomes)[0][1] == pytest.approx(times(plain.outcomes)[0][1] + 0.025)


def test_noise_is_seeded() -> None:
    """Noise changes durations by about its share, and the same seed gives the same."""
    noisy = {"num_requests": 50, "cluster": {"noise": 0.1}, "lengths": {"output": 40}}
    one, again, plain = run(noisy), run(noisy), run({**noisy, "cluster": {"noise": 0.0}})
    assert one.figures() == again.figures()
    assert one.counts.busy_s != plain.counts.busy_s
    assert one.counts.busy_s == pytest.approx(plain.counts.busy_s, rel=0.05)


MANY: dict[str, Any] = {
    "num_requests": 120,
    "cluster": {"instances": 3, "host_kv_tokens": 400, "kv_tokens": 200, "policy": "skip_join_mlfq"},
    "arrivals": {"process": "poisson", "rate_per_s": 2.0},
    "lengths": {"prompt": "uniform:1:40", "output": "uniform:1:40"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("swap", ["proactive", "reactive", "recompute"])
def test_the_same_seed_gives_the_same_bytes(policy: str, swap: str) -> None:
    """Whatever the policy, all requests get all of their tokens, twice the same run is the same JSON, and another seed
    is another.
    """
    changes = {**MANY, "cluster": {**MANY["cluster"], "policy": policy, "swap": swap}}
    one, again, other = run(changes), run(changes), run({**changes, "seed": 1})
    assert one.figures()["requests"] == {"arrived": 120, "completed": 120, "refused": 0, "unfinished": 0}
    assert as_json(one.figures()) == as_json(again.figures())
    assert as_json(one.figures()) != as_json(other.figures())


class Watched(Simulation):
    """Counts each client's tokens and ends."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__(config(changes), [PROFILE])
        self.num_tokens: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def _perform(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            self.num_tokens[effect.request_id] += len(effect.token_ids)
        if isinstance(effect, End):
            assert effect.reason is FinishReason.LENGTH
            self.ends[effect.request_id] += 1
        super()._perform(process, effect)


FAILURES = [
    {"process": "worker-1", "at_s": 10.0, "restart_at_s": 14.0},
    {"process": "worker-2", "at_s": 11.0},
    {"process": "coordinator", "at_s": 12.0, "restart_at_s": 20.0},
    {"process": "worker-1", "at_s": 30.0, "restart_at_s": 30.5},
]


def test_failures_lose_no_token() -> None:
    """With workers and the coordinator killed on a schedule, every client gets each of its tokens once, and one end."""
    simulation = Watched({**MANY, "failures": FAILURES})
    results = simulation.run()
    assert results.figures()["requests"]["completed"] == 120
    assert results.figures()["failovers"] > 0
    assert set(simulation.ends.values()) == {1}
    for number, num_output in enumerate(results.outcomes.num_output):
        assert simulation.num_tokens[str(number)] == num_output


class StepByStep(Simulation):
    """Every step is an event of its own."""

    def _num_quiet_steps(self, process: Process) -> int:
        return 0


@pytest.mark.parametrize("failures", [[], FAILURES], ids=["calm", "failures"])
@pytest.mark.parametrize(("noise", "overhead_s"), [(0.0, 0.05), (0.1, 0.05), (0.1, 0.5)])
@pytest.mark.parametrize("policy", ["skip_join_mlfq", "fcfs"])
def test_many_steps_in_one_event_are_the_same_as_each_alone(
    policy: str, noise: float, overhead_s: float, failures: list[dict[str, Any]]
) -> None:
    """Steps in which nothing is decided make one event, which changes no time and no figure except the number of
    events.
    """
    changes = {
        **MANY,
        "cluster": {
            **MANY["cluster"],
            "kv_tokens": 400,
            "policy": policy,
            "load_report_s": 3.0,
            "step_overhead_s": overhead_s,
            "noise": noise,
        },
        "arrivals": {"process": "poisson", "rate_per_s": 0.4},
        "failures": failures,
    }
    together = Simulation(config(changes), [PROFILE]).run()
    alone = StepByStep(config(changes), [PROFILE]).run()
    assert together.num_events < 0.95 * alone.num_events
    assert times(together.outcomes) == times(alone.outcomes)
    figures = [results.figures() for results in (together, alone)]
    assert [result.pop("events") for result in figures] == [together.num_events, alone.num_events]
    assert figures[0] == figures[1]


def test_reports_do_not_cut_runs_of_quiet_steps() -> None:
    """Ten times the load reports begin no more runs of steps, also those that come while a step is planned."""
    num_begun: Counter[float] = Counter()
    for report_s in (3.0, 0.3):

        class Counting(EngineModel):
            def begin(self, *arguments: Any, counted: float = report_s) -> Flight:
                num_begun[counted] += 1
                return super().begin(*arguments)

        cluster = {"load_report_s": report_s, "step_overhead_s": 0.05, "kv_tokens": 4000, "tokens_per_block": 100}
        changes = {"num_requests": 3, "cluster": cluster, "lengths": {"output": 100}}
        Simulation(config(changes), [PROFILE], make_engine=Counting).run()
    assert num_begun[0.3] == num_begun[3.0]


def test_a_death_is_noticed_after_the_watch_s_patience() -> None:
    """A killed worker's request continues on another one from the time at which the gateway learns of the death."""
    results = run(
        {
            "cluster": {"instances": 2, "death_after_s": 5.0},
            "failures": [{"process": "worker-0", "at_s": 1.5}, {"process": "worker-1", "at_s": 100.0}],
            "lengths": {"output": 1},
        }
    )
    ((ttft_s, _),) = times(results.outcomes)
    undisturbed_s = ASKING_S + 2.0 + NETWORK_S
    # It arrived at 1 s. Ties in freeness go to the greater name, so it was on worker-1.
    assert ttft_s == pytest.approx(undisturbed_s)
    results = run(
        {
            "cluster": {"instances": 2, "death_after_s": 5.0},
            "failures": [{"process": "worker-1", "at_s": 1.5}],
            "lengths": {"output": 1},
        }
    )
    ((ttft_s, _),) = times(results.outcomes)
    assert ttft_s == pytest.approx(0.5 + 5.0 + undisturbed_s)


def test_nobody_is_left_to_serve() -> None:
    """If no worker ever comes back, requests are refused after the gateway's timeout."""
    results = run({"cluster": {"no_instance_timeout_s": 7.0}, "failures": [{"process": "worker-0", "at_s": 0.5}]})
    assert results.figures()["requests"] == {"arrived": 1, "completed": 0, "refused": 1, "unfinished": 0}
    assert results.figures()["latency"]["ttft_s"] is None


def test_what_is_unfinished_is_counted() -> None:
    """After the drain limit a run ends, and reports how many requests were unfinished."""
    results = run({"lengths": {"output": 100}, "drain_limit_s": 10.0})
    assert results.figures()["requests"]["unfinished"] == 1
    assert math.isnan(results.outcomes.ended_s[0])


def test_prefixes_are_found() -> None:
    """Requests with one prefix reuse the prefix's KV, and no other KV of each other."""
    results = run(
        {
            "num_requests": 10,
            "cluster": {"prefix_cache": True},
            "arrivals": {"rate_per_s": 0.1},
            "lengths": {"prompt": 20},
            "prefixes": {"count": 1, "tokens": 10},
        }
    )
    # Two whole blocks of four, for all requests except the first.
    assert results.figures()["prefix_cache"] == {"looked_up": 200, "found": 72}


def test_classes_are_told_apart() -> None:
    """With priorities, each class has figures of its own, which add up."""
    results = run({**MANY, "priorities": {"0": 1.0, "1": 3.0}})
    classes = results.figures()["classes"]
    assert classes.keys() == {"0", "1"}
    assert classes["0"]["completed"] + classes["1"]["completed"] == 120
    assert 15 <= classes["0"]["completed"] <= 45
    assert classes["0"]["latency"]["e2e_s"]["mean"] < classes["1"]["latency"]["e2e_s"]["mean"]
