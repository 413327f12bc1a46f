"""The token budget follows the times of iterations, and lets prefills enter as fast as the decodes' target allows."""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import InstanceRole, SetRole, StepPlan
from actorserve.core.scheduling.policy import FirstComeFirstServed
from actorserve.core.scheduling.token_budget import MAX_PROMPT_TOKENS, MIN_PREFILL_TOKENS, TokenBudget
from actorserve.core.timing.profile import Curve, Link, Profile
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec

Cost = Callable[[int, int, int, int], float]
"""Seconds of an iteration, by its decodes, their context tokens, its prefill tokens, and computed tokens before."""


def cpu(decodes: int, contexts: int, tokens: int, before: int) -> float:
    """Decodes and prefills cost alike, and the weights are read in the time of a few."""
    return 0.006 + 0.0012 * decodes + 3e-6 * contexts + 0.0018 * tokens + 2e-7 * tokens * before + 1e-7 * tokens**2


def gpu(decodes: int, contexts: int, tokens: int, before: int) -> float:
    """An iteration takes long in any case, and a decode almost nothing."""
    return 0.012 + 1e-5 * decodes + 4e-8 * contexts + 2.5e-5 * tokens + 1e-9 * tokens * before


def profile_of(cost: Cost, factor: float = 1.0) -> Profile:
    """The profile of an engine with this cost, times ``factor``."""
    lengths, batches, contexts = (1, 64, 256, 512, 2048), (1, 8, 64), (0, 10_000)
    return Profile(
        name="measured",
        model="none",
        hardware="none",
        prefill=Curve(lengths, tuple(factor * cost(0, 0, n, 0) for n in lengths)),
        prefill_context_s=factor * (cost(0, 0, 100, 1000) - cost(0, 0, 100, 0)) / 100_000,
        decode=Curve(batches, tuple(factor * cost(n, 0, 0, 0) for n in batches)),
        decode_context=Curve(contexts, tuple(factor * (cost(1, n, 0, 0) - cost(1, 0, 0, 0)) for n in contexts)),
        swap=Link(0.0, 1e9),
        transfer=Link(0.0, 1e9),
        kv_bytes_per_token=1,
    )


class Simulation:
    """An engine of known cost under a budget, with prompts of one length that enter one after the other.

    Without a ``profile`` it uses one of that cost.
    """

    def __init__(
        self,
        cost: Cost,
        target_s: float,
        max_batch_tokens: int,
        noise: float = 0.0,
        profile: Profile | None = None,
    ) -> None:
        self.times = StepTimes(profile or profile_of(cost))
        self.budget = TokenBudget(target_s, max_batch_tokens, self.times)
        self.speed = 1.0
        self.num_prefilled = 0
        self._cost = cost
        self._noise = noise
        self._random = random.Random(0)

    def step(self, decodes: int, contexts: int, wanted: int, before: int = 0) -> float:
        """The seconds of one iteration. Afterwards ``num_prefilled`` is how many of ``wanted`` tokens were fed."""
        iteration = self.budget.begin(decodes, contexts)
        self.num_prefilled = iteration.take(wanted, before) if wanted else 0
        duration_s = self._cost(decodes, contexts, self.num_prefilled, before) / self.speed
        duration_s *= max(0.2, 1.0 + self._random.gauss(0.0, self._noise))
        self.times.observe(iteration.iteration, duration_s)
        return duration_s

    def serve(self, steps: int, decodes: int = 8, context: int = 512, prompt: int = 2000) -> list[float]:
        """The durations of iterations in which decodes run and prompts of one length enter one after another."""
        durations, before = [], 0
        for _ in range(steps):
            durations.append(self.step(decodes, decodes * context, prompt - before, before))
            before = (before + self.num_prefilled) % prompt
        return durations


@pytest.mark.parametrize(("cost", "target_s", "most"), [(cpu, 0.1, 512), (gpu, 0.025, 2048)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_iterations_converge_to_the_target(cost: Cost, target_s: float, most: int, noise: float) -> None:
    """Iterations last as long as the target allows, less a few percent, and prefills are nearly as fast as possible."""
    simulation = Simulation(cost, target_s, most, noise)
    simulation.step(0, 0, 512)
    simulation.step(8, 8 * 512, 0)
    durations = simulation.serve(200, prompt=10**6)
    assert max(durations[:10]) < (1.0 + 4 * noise) * 1.02 * target_s
    assert 0.9 * target_s < statistics.mean(durations[20:]) < 0.98 * target_s
    best = next(n for n in range(most, 0, -1) if cost(8, 8 * 512, n, 0) <= target_s)
    simulation = Simulation(cost, target_s, most, noise)
    simulation.serve(30, prompt=best)
    fed = [simulation.step(8, 8 * 512, most) and simulation.num_prefilled for _ in range(50)]
    assert 0.85 * best < statistics.mean(fed) < best


def test_the_profile_is_enough_to_begin_with() -> None:
    """Before any measurement an iteration is planned well if the profile is right."""
    for cost, target_s in ((cpu, 0.1), (gpu, 0.025)):
        simulation = Simulation(cost, target_s, 2048)
        assert 0.85 * target_s < simulation.step(8, 8 * 512, 1000) < target_s


@pytest.mark.parametrize(("cost", "other", "target_s"), [(cpu, gpu, 0.1), (gpu, cpu, 0.025)])
@pytest.mark.parametrize("factor", [0.1, 0.3, 0.5, 2.0, 4.0, 10.0, None])
def test_a_wrong_profile_is_corrected(cost: Cost, other: Cost, target_s: float, factor: float | None) -> None:
    """A profile up to ten times off, or another machine's, is corrected within tens of iterations.

    Prompts advance in all of them.
    """
    profile = profile_of(other) if factor is None else profile_of(cost, factor)
    simulation = Simulation(cost, target_s, 2048, 0.05, profile)
    for _ in range(40):
        simulation.serve(1, prompt=10**6)
        assert simulation.num_prefilled >= MIN_PREFILL_TOKENS
    durations = simulation.serve(60, prompt=2000)
    assert statistics.mean(durations) < target_s
    best = next(n for n in range(2048, 0, -1) if cost(8, 8 * 512, n, 1000) <= target_s)
    fed = [simulation.step(8, 8 * 512, 2048, 1000) and simulation.num_prefilled for _ in range(50)]
    assert 0.75 * best < statistics.mean(fed) < 1.05 * best


def test_a_slow_phase_is_followed() -> None:
    """While another program takes the machine, prefills yield, and afterwards they come back."""
    simulation = Simulation(cpu, 0.15, 512)
    usual = simulation.serve(60)[-1]
    usual_prefilled = simulation.num_prefilled
    simulation.speed = 0.5
    slow = simulation.serve(30)
    assert slow[0] > 0.2
    assert max(slow[7:]) < 0.15 * 1.03
    simulation.speed = 1.0
    assert simulation.serve(30)[-1] == pytest.approx(usual, rel=0.1)
    assert simulation.num_prefilled == pytest.approx(usual_prefilled, rel=0.15)


def test_one_outlier_costs_little() -> None:
    """After one iteration that takes many times as long, prefills keep most of their budget."""
    simulation = Simulation(cpu, 0.1, 512)
    simulation.serve(60, prompt=10**5)
    usual = simulation.num_prefilled
    simulation.speed = 0.02
    simulation.serve(1, prompt=10**5)
    simulation.speed = 1.0
    durations = simulation.serve(10, prompt=10**5)
    assert simulation.num_prefilled > 0.85 * usual
    assert max(durations) < 0.1


def test_more_decodes_leave_less() -> None:
    """The budget shrinks as soon as decodes join, before any such iteration was measured."""
    simulation = Simulation(cpu, 0.1, 512)
    for decodes in (1, 2, 4, 8):
        simulation.step(decodes, decodes * 512, 0)
        simulation.serve(20, decodes)
    few = simulation.budget.begin(8, 8 * 512).take(512, 0)
    many = simulation.budget.begin(16, 16 * 512).take(512, 0)
    assert few > many >= MIN_PREFILL_TOKENS
    assert simulation.step(16, 16 * 512, 512) < 1.15 * 0.1


def test_a_target_out_of_reach_still_lets_prefills_advance() -> None:
    """If decodes alone take longer than the target, prefills get the minimum in each iteration."""
    simulation = Simulation(cpu, 0.01, 512)
    simulation.step(0, 0, 512)
    for _ in range(50):
        simulation.step(8, 4096, 512)
        assert simulation.num_prefilled == MIN_PREFILL_TOKENS


def test_without_decodes_or_a_target_the_whole_batch_is_used() -> None:
    """Without decodes or without a target only max_batch_tokens bounds prefills."""
    simulation = Simulation(cpu, 0.01, 512)
    for _ in range(5):
        simulation.step(8, 4096, 512)
    assert simulation.budget.begin(0, 0).take(10**6, 0) == 512
    assert TokenBudget(math.inf, 512, StepTimes(PROFILE)).begin(8, 4096).take(10**6, 0) == 504


_DURATIONS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-4, 1.0)


@given(
    st.floats(1e-3, 10.0),
    st.integers(1, 4096),
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 10**6), st.lists(st.integers(1, 10**5), max_size=4), _DURATIONS),
        max_size=40,
    ),
)
def test_budgets_stay_in_bounds(target_s: float, most: int, steps: list[tuple[int, int, list[int], float]]) -> None:
    """Whatever durations are measured, prefills get no more than the batch holds, and advance if it has room."""
    times = StepTimes(PROFILE)
    budget = TokenBudget(target_s, most, times)
    for decodes, contexts, wanted, duration_s in steps:
        decodes = min(decodes, most)
        iteration = budget.begin(decodes, contexts)
        taken = [iteration.take(number, 100 * place) for place, number in enumerate(wanted)]
        assert all(0 <= number <= want for number, want in zip(taken, wanted, strict=True))
        assert sum(taken) <= most - decodes
        assert sum(taken) >= min(MIN_PREFILL_TOKENS, most - decodes, sum(wanted))
        times.observe(iteration.iteration, duration_s)


# --- in an instance --------------------------------------------------------------------------------------------------


class Timed(Instance):
    """An instance whose iterations take the time that ``cost`` gives."""

    def __init__(self, cost: Cost, target_s: float) -> None:
        super().__init__(
            replace(
                CONFIG,
                num_blocks=4096,
                tokens_per_block=16,
                max_context_tokens=8192,
                max_batch_requests=16,
                max_batch_tokens=512,
                tpot_target_s=target_s,
                prefix_cache=False,
            )
        )
        self.state = InstanceState(self.state.config, FirstComeFirstServed(), StepTimes(profile_of(cost)))
        self._cost = cost

    def measure(self, plan: StepPlan) -> float:
        is_decode = [len(tokens) == 1 for tokens in plan.token_ids]
        rows = list(zip(plan.starts, plan.token_ids, is_decode, strict=True))
        decodes = [start for start, _, decode in rows if decode]
        prefills = [(start, len(tokens)) for start, tokens, decode in rows if not decode]
        num_tokens = sum(n for _, n in prefills)
        before = sum(start * n for start, n in prefills) // max(1, num_tokens)
        return self._cost(len(decodes), sum(decodes), num_tokens, before)

    def finish_step(self) -> tuple[StepPlan, float]:
        """End the iteration in flight after its time; returns its plan and duration."""
        plan = self.plan
        assert plan is not None
        duration_s = self.measure(plan)
        self.done(duration_s=duration_s)
        return plan, duration_s


def test_a_long_prompt_does_not_delay_decodes() -> None:
    """While a long prompt enters, every iteration feeds all decodes and stays within the target."""
    instance = Timed(cpu, 0.1)
    for name in "abcd":
        instance.start(spec(name, 100, max_tokens=4000))
    for _ in range(12):
        instance.finish_step()
    instance.start(spec("long", 4000))
    durations = []
    instance.finish_step()  # was in flight when the long request arrived
    while instance.state.requests["long"].num_output == 0:
        plan, duration_s = instance.finish_step()
        assert {"a", "b", "c", "d"} <= set(plan.request_ids)
        durations.append(duration_s)
    assert max(durations[:3]) < 0.125
    assert max(durations[3:]) < 0.102
    assert statistics.mean(durations) > 0.085


def test_prompts_that_enter_together_share_one_budget_in_order() -> None:
    """Several prompts together get as much of an iteration as one prompt would, the most urgent first."""
    instance = Timed(cpu, 0.1)
    instance.start(spec("a", 100, max_tokens=4000))
    for _ in range(5):
        instance.finish_step()
    for name in "bcdefg":
        instance.start(spec(name, 30))
    instance.finish_step()
    entered: list[str] = []
    while len(entered) < 6:
        plan, duration_s = instance.finish_step()
        assert duration_s < 0.105
        entered += [name for name in plan.request_ids if name not in entered and name != "a"]
        assert plan.request_ids[0] == "a"
    assert entered == list("bcdefg")


def test_prompts_come_first_on_a_prompt_instance() -> None:
    """Decodes that wait there to be handed over do not hold up the prompts behind them."""
    budget = TokenBudget(0.03, 2048, StepTimes(profile_of(gpu)))
    assert budget.begin(4, 400).take(2000, 0) < 1000
    budget.prompts_first = True
    assert budget.begin(4, 400).take(2000, 0) == 2000


def test_a_prompt_instance_computes_so_many_prompt_tokens_at_once() -> None:
    """Splitwise's limit holds whatever larger batch the engine could take, and on prompt instances alone."""
    budget = TokenBudget(math.inf, 8192, StepTimes(profile_of(gpu)))
    assert budget.begin(4, 400).take(5000, 0) == 5000
    budget.prompts_first = True
    iteration = budget.begin(4, 400)
    assert (iteration.take(2000, 0), iteration.take(5000, 0)) == (2000, MAX_PROMPT_TOKENS - 2000)
    assert not iteration.has_room_for(1)
    assert TokenBudget(math.inf, 512, StepTimes(profile_of(gpu))).begin(4, 400).take(5000, 0) == 508


@pytest.mark.parametrize(("role", "num_fed"), [(InstanceRole.MIXED, 16), (InstanceRole.PROMPT, 60)])
def test_the_role_of_an_instance_decides_what_its_iterations_hold(role: InstanceRole, num_fed: int) -> None:
    """A new prompt of 60 tokens enters beside a request that decodes. A role that is ordered counts at once."""
    config = replace(CONFIG, num_blocks=64, max_context_tokens=128, max_batch_tokens=64, tpot_target_s=0.02)
    other = InstanceRole.PROMPT if role is InstanceRole.MIXED else InstanceRole.MIXED
    instance = Instance(replace(config, role=other))
    instance.start(spec("decodes", 3))
    instance.done()
    instance.handle(SetRole(role))
    instance.start(spec("new", 60))
    instance.done()
    assert instance.plan is not None
    assert [len(fed) for fed in instance.plan.token_ids] == [1, num_fed]
