"""A coordinator's core in a cluster with several: it serves, stands by, and serves again with an empty state."""

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.effects import Effect, ReloadKeys, Send
from actorserve.core.messages import (
    ActsDone,
    Answer,
    Command,
    Cordon,
    LoadReport,
    Message,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Serve,
    SetCordon,
    StandBy,
    Tick,
)
from actorserve.core.operations.tables import rows
from tests.core.harness.coordinator import A, B, Coordinator
from tests.core.harness.fleets import GATEWAY

NAME, OTHER = "alpha/coordinator", "beta/coordinator"
CALLER = Peer("console:local", 1)
SCALING = ScalingConfig(max_workers=4)


def _stood_by() -> Coordinator:
    """A coordinator that has served, with a cordoned worker and a waiting request, and now stands by."""
    coordinator = Coordinator(A)
    coordinator.handle(Serve(10, NAME), 0.0)
    coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 0.0)
    coordinator.report(A, 900)
    _ask(coordinator, "cordon", A.name, command_id="first")
    coordinator.place("waits", 10)
    assert "waits" in coordinator.state.waiting
    for peer in (A, GATEWAY):
        coordinator.handle(PeerDown(peer), 1.0)
    coordinator.handle(StandBy(11, OTHER), 1.0)
    return coordinator


def _ask(coordinator: Coordinator, verb: str, *arguments: str, command_id: str = "1", now: float = 0.0) -> Answer:
    effects = coordinator.handle(Command(command_id, verb, arguments), now, CALLER)
    (found,) = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == CALLER]
    assert isinstance(found, Answer)
    return found


def _sent(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_status_tells_who_serves_and_its_term() -> None:
    """Operators see the coordinator's name and its term."""
    coordinator = Coordinator(A)
    coordinator.handle(Serve(20, NAME), 0.0)
    shown = {row[0]: row[1] for row in rows(_ask(coordinator, "status").columns)}
    assert (shown["coordinator"], shown["term"]) == (NAME, "20")
    assert any({"serves", NAME} <= set(row) for row in rows(_ask(coordinator, "events", command_id="2").columns))


def test_a_coordinator_that_takes_over_reads_the_keys_again() -> None:
    """An operator's order to do so, after a key was taken out, has not reached it while it stood by."""
    coordinator = _stood_by()
    assert coordinator.handle(Serve(20, NAME), 5.0) == [ReloadKeys()]


def test_a_standby_does_nothing() -> None:
    """It decides nothing, scales nothing and has no deadline, whatever it is told."""
    coordinator = Coordinator(scaling=SCALING)
    coordinator.handle(Tick(), 0.0)
    assert coordinator.state.next_deadline() is not None
    coordinator.handle(StandBy(0, ""), 0.0)
    assert coordinator.state.next_deadline() is None
    assert coordinator.handle(Tick(), 100.0) == []
    assert coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 100.0) == []
    assert coordinator.state.operators.gateways == {}


def test_a_standby_names_the_one_that_serves() -> None:
    """An operator's command is refused in one line, which names the coordinator to ask."""
    coordinator = _stood_by()
    answer = _ask(coordinator, "status", now=2.0)
    assert (answer.outcome, answer.text) == (Outcome.STANDBY, f"this is a standby: {OTHER} serves, in term 11")
    coordinator.handle(StandBy(0, ""), 0.0)
    assert _ask(coordinator, "drain", "x", command_id="2").text == "no coordinator serves now"


def test_a_new_term_begins_with_an_empty_state() -> None:
    """Cordons and requests of the past are forgotten, because another coordinator may have changed them since."""
    coordinator = _stood_by()
    assert not coordinator.state.waiting
    assert not coordinator.state.fleet.instances
    coordinator.handle(Serve(20, NAME), 5.0)
    coordinator.up(A)
    effects = coordinator.handle(LoadReport(1, 0, 0, 1000, 0, 0, 10, 10, 0), 5.0, A)
    assert not any(isinstance(message, SetCordon) for message in _sent(effects))
    assert coordinator.state.operators.orders.cordons == {}


def test_cordons_are_learned_from_workers() -> None:
    """A worker that reports its cordon has it under the next coordinator, too."""
    coordinator = Coordinator(A, B)
    coordinator.handle(Serve(21, OTHER), 0.0)
    coordinator.report(A, 900, cordon=Cordon.CORDONED)
    assert coordinator.state.operators.orders.cordons == {A.name: Cordon.CORDONED}


def test_an_act_is_done_once_whoever_serves() -> None:
    """Answers to acts outlive a term, both its own and those of the file that the coordinators of a host share."""
    coordinator = _stood_by()
    coordinator.handle(ActsDone(("filed",), (Outcome.DONE,), ("done before",)), 1.0)
    coordinator.handle(Serve(20, NAME), 5.0)
    assert _ask(coordinator, "cordon", A.name, command_id="filed").text == "done before"
    assert _ask(coordinator, "cordon", A.name, command_id="first").outcome is Outcome.DONE
