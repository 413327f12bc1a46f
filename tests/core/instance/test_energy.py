"""An instance tells what its requests cost in joules, by phase, and tells nothing where it does not know that."""

import pytest

from actorserve.core.effects import Effect
from actorserve.core.messages import Energy, Finished, HandOver, PowerReading, Release, RequestSpec, Start
from actorserve.core.migration.config import MigrationMode
from tests.core.harness.driver import Instance, spec
from tests.core.harness.source import order, source

WATTS = 100.0


class Metered(Instance):
    """An instance on a device that takes 100 W while an iteration runs, and 10 W otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.joules = 0.0
        self.handle(PowerReading("GPU-0", energy_j=0.0), 0.0)

    def start(self, request: RequestSpec, epoch: int = 1) -> list[Effect]:
        return self.handle(Start(epoch, request), self.now)

    def compute(self, seconds: float = 0.1) -> None:
        """The iteration in flight takes so long."""
        self.now += seconds
        self.joules += WATTS * seconds
        self.done(now=self.now, duration_s=seconds)

    def idle(self, seconds: float) -> None:
        self.now += seconds
        self.joules += WATTS / 10.0 * seconds

    def read(self) -> None:
        self.handle(PowerReading("GPU-0", energy_j=self.joules), self.now)

    def ending(self, name: str) -> Energy | None:
        """What the end of this request told."""
        return next(each.energy for each in self.sent if isinstance(each, Finished) and each.request_id == name)


def test_the_end_of_a_request_tells_its_energy_by_phase() -> None:
    """Two chunks of a prompt and then two tokens, of 0.1 s each at 100 W."""
    instance = Metered()
    instance.start(spec("warm", 3, max_tokens=1))
    instance.compute()
    instance.read()  # so that the power of iterations is known
    instance.start(spec("a", 16, max_tokens=3))
    for _ in range(4):
        instance.compute()
    energy = instance.ending("a")
    assert energy is not None
    assert energy.prompt_j == pytest.approx(20.0)
    assert energy.token_j == pytest.approx(20.0)


def test_requests_and_the_rest_sum_to_the_devices_energy() -> None:
    """A load report's sums and what belongs to no request are all of the device's energy; idle time is no request's."""
    instance = Metered()
    instance.start(spec("a", 8, max_tokens=4))
    instance.start(spec("b", 5, max_tokens=2))
    for step in range(6):
        if instance.plan is not None:
            instance.compute(0.1 + step / 100)
            instance.read()
    assert not instance.state.requests
    instance.idle(3.0)
    instance.read()
    report = instance.state.load_report()
    account = instance.state.steps.energy
    assert report.prompt_energy_j is not None
    assert report.token_energy_j is not None
    told = instance.ending("b")
    assert told is not None
    assert report.prompt_energy_j + report.token_energy_j + account.rest_j == pytest.approx(instance.joules)
    assert account.rest_j >= 30.0
    assert told.prompt_j > 0.0
    assert told.token_j > 0.0


def test_longer_prompts_cost_more_of_a_shared_iteration() -> None:
    """A chunk of five tokens and one of two share an iteration by what the profile says of them."""
    instance = Metered()
    instance.start(spec("first", 1, max_tokens=9))
    instance.start(spec("long", 5, max_tokens=9))
    instance.start(spec("short", 2, max_tokens=9))
    instance.compute()
    plan = instance.plan
    assert plan is not None
    assert plan.request_ids == ("first", "long", "short")
    instance.compute()
    instance.read()
    spent = {name: instance.state.steps.energy.spent(request) for name, request in instance.state.requests.items()}
    long, short = spent["long"], spent["short"]
    assert long is not None
    assert short is not None
    assert long.prompt_j > short.prompt_j > 0.0
    times = instance.state.times
    assert long.prompt_j / short.prompt_j == pytest.approx(times.prefill_s(5) / times.prefill_s(2))


def test_without_power_nothing_is_told() -> None:
    """No reading, or readings without power: the ends and the load report have no energy."""
    instance = Instance()
    instance.handle(PowerReading(device="GPU-0", temperature_c=50.0))
    instance.start(spec("a", 3, max_tokens=1))
    instance.done(now=0.1)
    (finished,) = [each for each in instance.sent if isinstance(each, Finished)]
    assert finished.energy is None
    report = instance.state.load_report()
    assert (report.prompt_energy_j, report.token_energy_j) == (None, None)


def test_a_request_that_began_before_the_first_reading_has_no_energy() -> None:
    """A part of its energy was never measured."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=2))
    instance.done(now=0.1)
    instance.handle(PowerReading("GPU-0", energy_j=0.0), 0.1)
    instance.done(now=0.2)
    instance.handle(PowerReading("GPU-0", energy_j=10.0), 0.3)
    (finished,) = [each for each in instance.sent if isinstance(each, Finished)]
    assert finished.energy is None


def test_a_source_tells_what_it_spent_when_it_hands_a_request_over() -> None:
    """The request for a hand-over has the energy of the prompt and the tokens that were computed here."""
    instance = source(MigrationMode.RECOMPUTE)
    instance.handle(PowerReading("GPU-0", energy_j=0.0), 0.0)
    instance.start(spec("r", 5, max_tokens=100))
    instance.done(now=0.1)
    instance.handle(PowerReading("GPU-0", energy_j=10.0), 0.1)
    assert order(instance, now=0.1) == [], "the iteration in flight ends first"
    instance.done(now=0.3)
    (hand_over,) = [each for each in instance.sent if isinstance(each, HandOver)]
    assert hand_over.energy is not None
    assert hand_over.energy.prompt_j == pytest.approx(10.0)
    assert hand_over.energy.token_j == pytest.approx(20.0), "at the power of the prompt, because none was read since"
    instance.handle(Release("r", 1), 0.3)
    instance.handle(PowerReading("GPU-0", energy_j=30.0), 0.3)
    account = instance.state.steps.energy
    assert (account.prompt_j, account.token_j) == pytest.approx((10.0, 20.0))
