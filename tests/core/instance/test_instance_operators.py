"""Operators' commands at an instance's core: cordons, moves of single requests, priorities and what it remembers."""

from actorserve.core.effects import Drained, Effect, Meet, ReloadKeys, Send, SetLogLevel
from actorserve.core.messages import (
    Answer,
    Command,
    Cordon,
    Drain,
    LoadReport,
    Offer,
    Orders,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    PowerReading,
    Role,
    SetCordon,
)
from tests.core.harness.driver import CONFIG, PROFILE, Instance, spec
from tests.core.harness.source import COORDINATOR, D, decoding, source, told


def ask(instance: Instance, verb: str, *arguments: str, command_id: str = "1", dry_run: bool = False) -> list[Effect]:
    return instance.handle(Command(command_id, verb, arguments, dry_run), 0.0, COORDINATOR)


def answer(effects: list[Effect]) -> Answer:
    (found,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Answer)]
    return found


def commanded() -> Instance:
    """An instance with a decoding request, which knows the coordinator."""
    instance = source()
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    decoding(instance)
    return instance


def test_a_cordon_is_reported_at_once_and_requests_still_arrive() -> None:
    """What was placed before the order is served."""
    instance = commanded()
    effects = instance.handle(SetCordon(Cordon.EMPTYING), 0.0, COORDINATOR)
    (report,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, LoadReport)]
    assert report.cordon is Cordon.EMPTYING
    assert not report.draining
    instance.start(spec("late", 3))
    assert "late" in instance.state.requests


def test_a_request_moves_where_the_operator_says() -> None:
    """It is offered to that worker in the same step; a repeated command moves nothing else."""
    instance = commanded()
    effects = ask(instance, "migrate", "r", D.name, "1")
    assert isinstance(told(effects, D)[0], Offer)
    assert answer(effects).text == "r moves to worker-1"
    again = ask(instance, "migrate", "r", D.name, "1")
    assert told(again, D) == []
    assert answer(again) == answer(effects)
    assert answer(ask(instance, "migrate", "r", D.name, "1", command_id="2")).text == (
        "r: it is moving to worker-1 already"
    )


def test_a_worker_that_is_not_met_yet_is_met_first() -> None:
    """The request moves once that worker is up."""
    instance = commanded()
    other = Peer("worker-7", 3)
    assert Meet(other) in ask(instance, "migrate", "r", "worker-7", "3")
    assert any(isinstance(m, Offer) for m in told(instance.handle(PeerUp(other, Role.WORKER)), other))


def test_an_order_that_cannot_be_followed_ends() -> None:
    """A worker that never comes up gets nothing after the order's time."""
    instance = commanded()
    other = Peer("worker-7", 3)
    ask(instance, "migrate", "r", "worker-7", "3")
    instance.done(now=11.0)
    assert told(instance.handle(PeerUp(other, Role.WORKER), 11.0), other) == []


def test_an_unknown_request_and_a_dry_run_move_nothing() -> None:
    """Both are answered, and nothing is offered."""
    instance = commanded()
    assert answer(ask(instance, "migrate", "x", D.name, "1")).outcome is Outcome.REFUSED
    effects = ask(instance, "migrate", "r", D.name, "1", command_id="2", dry_run=True)
    assert (answer(effects).text, told(effects, D)) == ("r would move to worker-1", [])


def test_only_a_coordinator_may_command() -> None:
    """Another worker's command is dropped and counted."""
    instance = commanded()
    assert instance.handle(Command("1", "migrate", ("r", D.name, "1")), 0.0, D) == []
    assert instance.state.num_stale_messages == 1


def test_a_priority_changes_the_order() -> None:
    """The request is ordered by its new priority from the next iteration on."""
    instance = commanded()
    ask(instance, "priority", "r", "5")
    assert instance.state.requests["r"].spec.priority == 5
    instance.done()


def test_the_log_level_is_an_effect() -> None:
    """The process sets it; an unknown level is refused."""
    instance = commanded()
    assert SetLogLevel("debug") in ask(instance, "log-level", "debug")
    assert answer(ask(instance, "log-level", "loud", command_id="2")).outcome is Outcome.REFUSED


def test_the_actor_answers_what_keys_were_read() -> None:
    """The core only passes the coordinator's command on, and answers a dry run itself."""
    instance = commanded()
    assert ask(instance, "reload-keys") == [ReloadKeys(COORDINATOR, "1")]
    assert answer(ask(instance, "reload-keys", command_id="2", dry_run=True)).outcome is Outcome.DONE


def test_an_instance_remembers_admissions_and_preemptions() -> None:
    """``show`` lists what happened to a request's KV here."""
    instance = commanded()
    shown = answer(ask(instance, "show", "r"))
    assert [column.texts for column in shown.columns if column.name == "event"] == [("admitted",)]
    assert answer(ask(instance, "show", "x", command_id="2")).outcome is Outcome.REFUSED


def test_a_drain_that_comes_back_says_so_at_its_end() -> None:
    """A second Drain without it, as scaling repeats it, does not take it back."""
    instance = source()
    instance.handle(Drain(comes_back=True), 0.0, COORDINATOR)
    assert Drained(comes_back=True) in instance.effects
    busy = commanded()
    busy.handle(Drain(comes_back=True), 0.0, COORDINATOR)
    busy.handle(Drain(), 0.0, COORDINATOR)
    assert busy.state._comes_back


def test_a_report_tells_how_long_decoding_takes_by_the_profile() -> None:
    """It is the profile's time for all started requests, whatever steps have taken."""
    instance = commanded()
    report = instance.state.load_report()
    tokens = report.kv_needed_bytes // report.bytes_per_block * report.tokens_per_block
    assert report.num_running == 1
    assert report.decode_s == PROFILE.decode_s(1, tokens) > 0.0
    assert Instance(CONFIG).state.load_report().decode_s == 0.0


def test_the_last_reading_of_power_is_in_the_load_reports() -> None:
    """Without a reading the power is unknown, and a later reading replaces an earlier one."""
    instance = Instance(CONFIG)
    assert instance.state.load_report().power is None
    for watts in (100.0, 200.0):
        instance.handle(PowerReading("GPU-0", watts), 0.0)
    assert instance.state.load_report().power == PowerReading("GPU-0", 200.0)


def test_orders_are_kept_for_the_next_coordinator() -> None:
    """An instance tells each coordinator that it begins to follow what earlier ones told it, and believes no other."""
    instance = commanded()
    orders = Orders(("cordon",), ("worker-1",), ("cordoned",), (10,), (1,))
    instance.handle(Orders(("scale",), ("",), ("7",), (99,), (9,)), 0.0, D)
    instance.handle(orders, 0.0, COORDINATOR)
    instance.handle(PeerDown(COORDINATOR), 1.0)
    following = Peer("coordinator", 2)
    assert told(instance.handle(PeerUp(following, Role.COORDINATOR), 2.0), following)[0] == orders
