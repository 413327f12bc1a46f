"""The coordinator caps devices by the roles that their workers report, and operators change budgets."""

from dataclasses import replace

from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    Answer,
    Command,
    InstanceRole,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    PowerReading,
    PowerReport,
    Role,
    SetPowerCaps,
    Tick,
)
from actorserve.core.operations.tables import rows
from actorserve.core.power.governor import PowerConfig
from tests.core.harness.coordinator import A, B, Coordinator
from tests.core.harness.fleets import report
from tests.core.power.plant import h100

ACTUATOR, CONSOLE = Peer("power", 1), Peer("console:anna", 1)
TWO = PowerReport(0, (h100("x"), h100("y")))


def caps(effects: list[Effect]) -> list[tuple[Peer, SetPowerCaps]]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [(send.to, send.message) for send in sends if isinstance(send.message, SetPowerCaps)]


def answer(coordinator: Coordinator, now: float, *words: str) -> Answer:
    effects = coordinator.handle(Command(f"{now}", words[0], words[1:]), now, CONSOLE)
    [found] = [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Answer)]
    return found


def test_a_device_without_a_worker_pays_for_the_others() -> None:
    """A worker's reading names its device, and the device that no worker names gives up its watts."""
    coordinator = Coordinator(A, power=PowerConfig(budget_watts=1000.0))
    coordinator.handle(replace(report(500), power=PowerReading("x", 300.0)), 1.0, A)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    assert coordinator.state.next_deadline() == 1.0
    [(to, order)] = caps(coordinator.handle(Tick(), 1.0))
    assert (to, order) == (ACTUATOR, SetPowerCaps(1, ("y",), (300.0,), 1000.0))


def test_the_role_that_a_worker_reports_decides_what_it_pays() -> None:
    """The device of a token instance is lowered, and that of a prompt instance keeps its full power."""
    coordinator = Coordinator(A, B, power=PowerConfig(budget_watts=1050.0))
    for peer, device, role in ((A, "x", InstanceRole.TOKEN), (B, "y", InstanceRole.PROMPT)):
        coordinator.handle(replace(report(500), power=PowerReading(device), role=role), 1.0, peer)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    [(_, order)] = caps(coordinator.handle(Tick(), 1.0))
    assert (order.devices, order.caps_watts) == (("x",), (350.0,))
    assert [row[2] for row in rows(answer(coordinator, 1.1, "cap").columns)] == ["token", "prompt"]


def test_tokens_that_take_their_time_may_not_be_slowed() -> None:
    """A worker's report tells how long its tokens take, and its device is lowered first as far as they allow."""
    coordinator = Coordinator(A, B, power=PowerConfig(budget_watts=800.0, tpot_target_s=0.1))
    for peer, device, decode_s in ((A, "x", 0.1), (B, "y", 0.02)):
        coordinator.handle(replace(report(500), power=PowerReading(device), decode_s=decode_s), 1.0, peer)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    [(_, order)] = caps(coordinator.handle(Tick(), 1.0))
    assert dict(zip(order.devices, order.caps_watts, strict=True)) == {"x": 452.0, "y": 347.0}


def test_reports_of_strangers_change_nothing() -> None:
    """Only an actuator that is up reports devices, and one that went down is asked for nothing."""
    coordinator = Coordinator(A, B, power=PowerConfig(budget_watts=1000.0))
    coordinator.handle(TWO, 1.0, A)
    assert coordinator.state.num_stale_messages == 1
    assert coordinator.state.power.next_s is None
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    coordinator.handle(PeerDown(ACTUATOR), 1.1)
    assert caps(coordinator.handle(Tick(), 1.2)) == []


def test_an_operator_changes_the_budget_at_once() -> None:
    """A changed budget leads to orders without waiting for the next round, and can be taken away again."""
    coordinator = Coordinator(A)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    assert caps(coordinator.handle(Tick(), 1.0)) == []
    found = answer(coordinator, 1.1, "budget", "900")
    assert (found.outcome, found.text) == (
        Outcome.DONE,
        "cluster has a budget of 900 W until the whole server restarts",
    )
    assert coordinator.state.next_deadline() == 1.1
    [(_, order)] = caps(coordinator.handle(Tick(), 1.1))
    assert order.caps_watts == (450.0, 450.0)
    assert answer(coordinator, 1.2, "budget", "none").outcome is Outcome.DONE
    assert coordinator.state.power.governor.budget_watts is None


def test_wrong_budgets_are_refused() -> None:
    """What is no number of watts, or no host, changes nothing, and the answer says what is expected."""
    coordinator = Coordinator(A)
    for now, words in enumerate((("budget", "-5"), ("budget", "nan"), ("budget", "many"), ("budget", "5", "mars"))):
        found = answer(coordinator, float(now), *words)
        assert found.outcome is Outcome.REFUSED
        assert "expected" in found.text
    assert answer(coordinator, 9.0, "cap").outcome is Outcome.REFUSED, "there is no actuator"


def test_operators_see_caps_and_draws() -> None:
    """The verb ``cap`` has a row for each device, and the status their sums."""
    coordinator = Coordinator(A)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(PowerReport(0, (replace(h100("x"), draw_watts=None), h100("y", 300.0))), 1.0, ACTUATOR)
    table = rows(answer(coordinator, 1.1, "cap").columns)
    assert table == [
        ("localhost", "x", "unused", None, 700.0, 200.0, 700.0, None, "uncapped"),
        ("localhost", "y", "unused", 0.0, 300.0, 200.0, 700.0, None, "capped"),
    ]
    status = dict(coordinator.state.power.status())
    assert status["power"] == "2 device(s) together: draw unknown, power limits 1000 W"


def test_what_is_not_known_is_not_shown() -> None:
    """A cap that the driver does not tell makes the sum unknown, and an ended actuator's readings are old."""
    coordinator = Coordinator(A)
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    other = Peer("beta/power", 1)
    coordinator.handle(PeerUp(other, Role.POWER), 1.0)
    coordinator.handle(PowerReport(0, (replace(h100("x"), cap_watts=None, draw_watts=80.0),)), 1.0, ACTUATOR)
    coordinator.handle(PowerReport(0, (replace(h100("y"), draw_watts=500.0, is_throttled=True),)), 1.0, other)
    status = dict(coordinator.state.power.status())
    assert status["power"] == "2 device(s) together: draw 580 W, power limits unknown"
    coordinator.handle(PeerDown(other), 1.1)
    table = {row[1]: row for row in rows(answer(coordinator, 1.2, "cap").columns)}
    assert (table["x"][3], table["x"][4], table["x"][-1]) == (80.0, None, "unknown")
    assert (table["y"][3], table["y"][4], table["y"][-1]) == (None, 700.0, "cannot be set")


def test_an_infeasible_budget_is_an_event() -> None:
    """Operators read it once among the events, with the least watts."""
    coordinator = Coordinator(A, power=PowerConfig(budget_watts=100.0))
    coordinator.handle(PeerUp(ACTUATOR, Role.POWER), 1.0)
    coordinator.handle(TWO, 1.0, ACTUATOR)
    for step in range(8):
        coordinator.handle(Tick(), 1.0 + step / 4)
    texts = [row[-1] for row in rows(coordinator.state.operators.events.table(0, 9.0))]
    assert texts.count("the budget of 100 W cannot be met: its devices take at least 400 W") == 1
