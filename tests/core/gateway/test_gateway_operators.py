"""Operators' commands at a gateway's core: its open requests, their way, and their end."""

from actorserve.core.effects import Effect, End, Send
from actorserve.core.messages import (
    Answer,
    Command,
    FinishReason,
    HandOver,
    Orders,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    Placed,
    RefusalReason,
    Release,
    Role,
    Unplace,
)
from actorserve.core.messages.values import NEWCOMER
from actorserve.core.operations.tables import rows
from tests.core.harness.gateway import COORDINATOR, A, B, Gateway, opened, running, start, tokens


def ask(gateway: Gateway, verb: str, *arguments: str, now: float = 0.0, dry_run: bool = False) -> list[Effect]:
    return gateway.handle(Command("1", verb, arguments, dry_run), now, COORDINATOR)


def answer(effects: list[Effect]) -> Answer:
    (found,) = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == COORDINATOR]
    assert isinstance(found, Answer)
    return found


def column(of: Answer, name: str) -> list[object]:
    return [value for found in of.columns if found.name == name for (value,) in rows([found])]


def test_open_requests_are_listed_with_their_worker() -> None:
    """A row tells where the request is, its tokens and its age; a worker's name chooses its requests."""
    gateway = running(A, B)
    gateway.handle(tokens(1, 0, 7), 0.5, A)
    listed = answer(ask(gateway, "requests", now=2.0))
    names = ("request", "state", "worker", "prompt_tokens", "output_tokens", "age_s", "silent_s")
    assert [column(listed, name) for name in names] == [["r"], ["running"], ["worker-0"], [3], [1], [2.0], [1.5]]
    assert column(answer(ask(gateway, "requests", "worker-1")), "request") == []


def test_a_cancelled_request_ends_at_its_client_and_on_its_worker() -> None:
    """The client gets an error that tells it, the worker frees the request, and a repeated command does nothing."""
    gateway = running(A)
    effects = ask(gateway, "cancel", "r")
    assert End("r", FinishReason.ERROR, RefusalReason.CANCELLED) in effects
    assert Send(A, Release("r", 1)) in effects
    assert answer(effects).outcome is Outcome.DONE
    assert ask(gateway, "cancel", "r") == [Send(COORDINATOR, answer(effects))]
    assert gateway.state.sessions == {}


def test_a_waiting_request_is_cancelled_at_the_coordinator_too() -> None:
    """The coordinator forgets its place."""
    assert Send(COORDINATOR, Unplace("r", 1)) in ask(opened(A), "cancel", "r")


def test_a_dry_run_cancels_nothing() -> None:
    """The request goes on, and the act itself may follow under the same id."""
    gateway = running(A)
    assert answer(ask(gateway, "cancel", "r", dry_run=True)).text == "would do: r ends"
    assert "r" in gateway.state.sessions
    assert answer(ask(gateway, "cancel", "r")).outcome is Outcome.DONE


def test_what_is_not_open_is_refused() -> None:
    """An unknown request, and a verb that is not a gateway's, are refused."""
    gateway = running(A)
    assert answer(ask(gateway, "cancel", "x")).text == "there is no open request x"
    assert answer(gateway.handle(Command("2", "drain", ("worker-0",)), 0.0, COORDINATOR)).outcome is Outcome.REFUSED


def test_only_the_coordinator_may_command() -> None:
    """A worker's command is dropped and counted."""
    gateway = running(A)
    assert gateway.handle(Command("1", "cancel", ("r",)), 0.0, A) == []
    assert gateway.state.counts.num_stale_messages == 1
    assert "r" in gateway.state.sessions


def test_the_way_of_a_request_is_told_with_times() -> None:
    """Placed, arrived, first token, migrated, ended: each with its age, also after the end."""
    gateway = opened(A, B)
    gateway.handle(Placed("r", 1, A, 0.25), 1.0, COORDINATOR)
    gateway.handle(tokens(1, 0, 7), 2.0, A)
    gateway.handle(HandOver("r", 1, B, None, 1, NEWCOMER), 3.0, A)
    ask(gateway, "cancel", "r", now=4.0)
    way = answer(gateway.handle(Command("2", "show", ("r",)), 5.0, COORDINATOR))
    assert list(zip(column(way, "ago_s"), column(way, "event"), strict=True)) == [
        (5.0, "came"),
        (4.0, "placed"),
        (3.0, "first token"),
        (2.0, "migrated"),
        (1.0, "ended"),
    ]
    assert "worker-0, after 0.250 s" in str(column(way, "text")[1])


def test_a_changed_priority_goes_with_the_request() -> None:
    """The next worker is told the new priority."""
    gateway = running(A, B)
    ask(gateway, "priority", "r", "-3")
    effects = gateway.handle(HandOver("r", 1, B, None, 0, NEWCOMER), 0.0, A)
    (begun,) = [e.message for e in effects if isinstance(e, Send) and e.to == B]
    assert begun != start(2)
    assert begun.request.priority == -3  # type: ignore[union-attr]


def test_orders_are_kept_for_the_next_coordinator() -> None:
    """A gateway tells each coordinator that it begins to follow what earlier ones told it, and believes no other."""
    gateway = running(A)
    orders = Orders(("cordon",), ("worker-1",), ("cordoned",), (10,), (1,))
    gateway.handle(Orders(("scale",), ("",), ("7",), (99,), (9,)), 0.0, A)
    gateway.handle(orders, 0.0, COORDINATOR)
    gateway.handle(PeerDown(COORDINATOR), 1.0)
    following = Peer("coordinator", 2)
    assert Send(following, orders) in gateway.handle(PeerUp(following, Role.COORDINATOR), 2.0)
