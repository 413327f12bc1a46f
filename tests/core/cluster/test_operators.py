"""Operators' commands at the coordinator's core: what it answers, what it asks others, and what is done only once."""

from dataclasses import replace

from actorserve.core.cluster.scaling import ScalingConfig
from actorserve.core.effects import Audit, Effect, ReloadKeys, Send, SetLogLevel, StartWorker
from actorserve.core.messages import (
    LOCAL,
    ActsDone,
    Answer,
    Column,
    Command,
    Cordon,
    Drain,
    LoadReport,
    Orders,
    Outcome,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    SetCordon,
    Tick,
)
from actorserve.core.migration.pairing import PairingConfig
from actorserve.core.operations.process_verbs import keys_answer
from actorserve.core.operations.tables import rows
from tests.core.harness.coordinator import A, B, Coordinator, placements
from tests.core.harness.fleets import GATEWAY

CALLER = Peer("console:local", 1)
OTHER = Peer("console:local", 2)


def cluster() -> Coordinator:
    """Two workers that have reported, and a gateway."""
    coordinator = Coordinator(A, B)
    coordinator.handle(PeerUp(GATEWAY, Role.GATEWAY), 0.0)
    coordinator.report(A, 900)
    coordinator.report(B, 500)
    return coordinator


def ask(
    coordinator: Coordinator, verb: str, *arguments: str, command_id: str = "1", now: float = 0.0, dry_run: bool = False
) -> list[Effect]:
    return coordinator.handle(Command(command_id, verb, arguments, dry_run), now, CALLER)


def answer(effects: list[Effect], caller: Peer = CALLER) -> Answer:
    """The one answer to the caller."""
    (found,) = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == caller]
    assert isinstance(found, Answer)
    return found


def sent(effects: list[Effect], *peers: Peer) -> list[object]:
    """The messages to these peers, but for orders that they only keep (``test_lasting_orders``)."""
    messages = [effect.message for effect in effects if isinstance(effect, Send) and effect.to in peers]
    return [message for message in messages if not isinstance(message, Orders)]


def audited(effects: list[Effect]) -> list[tuple[str, str, Outcome]]:
    return [(effect.caller, effect.command.verb, effect.outcome) for effect in effects if isinstance(effect, Audit)]


def table(of: Answer, *names: str) -> list[tuple[object, ...]]:
    """The rows of these columns."""
    by_name = {column.name: column for column in of.columns}
    return list(rows([by_name[name] for name in names]))


def _report(coordinator: Coordinator, peer: Peer, cordon: Cordon = Cordon.OPEN, **fields: int) -> LoadReport:
    """The next report of a worker."""
    coordinator.sequence += 1
    view = coordinator.state.fleet.views[peer]
    report = replace(view.report, sequence=coordinator.sequence, accepted=tuple(view.in_flight), cordon=cordon)
    return replace(report, **fields)  # type: ignore[arg-type]


def test_workers_are_listed_with_their_state() -> None:
    """Each worker has one row, in the order in which they came up; a name or a host chooses some of them."""
    coordinator = cluster()
    coordinator.up(Peer("alpha/worker-0", 5))
    assert table(answer(ask(coordinator, "workers")), "worker", "host", "state") == [
        ("worker-0", "localhost", "open"),
        ("worker-1", "localhost", "open"),
        ("alpha/worker-0", "alpha", "starting"),
    ]
    assert table(answer(ask(coordinator, "workers", "alpha")), "worker") == [("alpha/worker-0",)]
    assert table(answer(ask(coordinator, "workers", "worker-1")), "worker") == [("worker-1",)]


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    """A verb, a worker and an argument that do not exist are refused in one line, and nothing is sent."""
    coordinator = cluster()
    for verb, arguments, text in (
        ("workes", (), "there is no verb 'workes'; did you mean workers?"),
        ("cordon", ("worker-9",), "there is no worker or host worker-9; did you mean worker-1?"),
        ("cordon", (), "cordon takes WORKER|HOST, and got 0 argument(s)"),
        ("events", ("x",), "SINCE is 'x': expected a number from 0"),
        ("migrate", ("r", "nobody"), "there is no worker or host nobody"),
    ):
        effects = ask(coordinator, verb, *arguments, command_id=verb + str(arguments))
        assert answer(effects) == Answer(verb + str(arguments), Outcome.REFUSED, text)
        assert sent(effects, A, B, GATEWAY) == []


def test_cordon_tells_the_worker_until_it_reports_it() -> None:
    """The worker hears of the order again with each report that does not show it, and gets no request meanwhile."""
    coordinator = cluster()
    effects = ask(coordinator, "cordon", "worker-0")
    assert answer(effects).text == "worker-0: gets no more requests"
    assert sent(effects, A) == [SetCordon(Cordon.CORDONED)]
    assert placements(coordinator.place("r1", 100)) == [("r1", "worker-1")]
    again = coordinator.handle(_report(coordinator, A), 0.1, A)
    assert sent(again, A) == [SetCordon(Cordon.CORDONED)]
    told = coordinator.handle(_report(coordinator, A, Cordon.CORDONED), 0.2, A)
    assert sent(told, A) == []
    assert table(answer(ask(coordinator, "workers", "worker-0", command_id="2")), "state") == [("cordoned",)]
    assert sent(ask(coordinator, "uncordon", "localhost", command_id="3"), A, B) == [SetCordon(Cordon.OPEN)]


def test_a_drained_worker_is_empty_once_it_reports_no_request() -> None:
    """The state is ``emptying`` until a report that knows of the order shows no request and no move."""
    coordinator = cluster()
    ask(coordinator, "drain", "worker-0")
    states = [table(answer(ask(coordinator, "workers", "worker-0", command_id="2")), "state")]
    for fields in ({}, {"num_running": 0, "num_migrating": 1}, {"num_migrating": 0}):
        coordinator.handle(_report(coordinator, A, Cordon.EMPTYING, **fields), 0.1, A)
        states.append(table(answer(ask(coordinator, "workers", "worker-0", command_id="3")), "state"))
    assert [state for ((state,),) in states] == ["emptying", "emptying", "emptying", "empty"]


def test_a_worker_that_restarts_stays_cordoned() -> None:
    """A new incarnation under a cordoned name is cordoned from its first report on, until it is uncordoned."""
    coordinator = cluster()
    ask(coordinator, "cordon", "worker-0")
    coordinator.handle(PeerDown(A), 1.0)
    again = Peer("worker-0", 2)
    coordinator.up(again)
    assert coordinator.report(again, 900) == []
    assert placements(coordinator.place("r1", 100)) == [("r1", "worker-1")]
    ask(coordinator, "uncordon", "worker-0", command_id="2")
    assert placements(coordinator.place("r2", 100)) == [("r2", "worker-0")]


def test_restart_drains_a_worker_that_comes_back() -> None:
    """The worker is told until it reports that it drains, and gets nothing."""
    coordinator = cluster()
    assert sent(ask(coordinator, "restart", "worker-0"), A) == [Drain(comes_back=True)]
    assert sent(coordinator.handle(_report(coordinator, A), 0.1, A), A) == [Drain(comes_back=True)]
    assert table(answer(ask(coordinator, "workers", "worker-0", command_id="2")), "state") == [("restarting",)]
    assert placements(coordinator.place("r1", 100)) == [("r1", "worker-1")]


def test_an_act_is_done_once_for_its_id_and_audited_once() -> None:
    """A repeated id gets the first answer, on whatever connection it comes, although the operator took the act back."""
    coordinator = cluster()
    first = ask(coordinator, "cordon", "worker-0", command_id="a")
    ask(coordinator, "uncordon", "worker-0", command_id="b")
    again = coordinator.handle(Command("a", "cordon", ("worker-0",)), 1.0, OTHER)
    assert again == [Send(OTHER, answer(first))]
    assert audited(first) == [("local", "cordon", Outcome.DONE)]
    assert table(answer(ask(coordinator, "workers", "worker-0", command_id="c")), "state") == [("open",)]


def test_a_new_coordinator_knows_the_audited_answers() -> None:
    """An id that the audit file holds is answered from there, and nothing is done."""
    coordinator = cluster()
    coordinator.handle(ActsDone(("a",), (Outcome.DONE,), ("worker-0: gets no more requests",)), 0.0)
    effects = ask(coordinator, "cordon", "worker-0", command_id="a")
    assert effects == [Send(CALLER, Answer("a", Outcome.DONE, "worker-0: gets no more requests"))]


def test_a_dry_run_changes_nothing_and_is_not_audited() -> None:
    """It answers what would be done, and an act with the same id is still done."""
    coordinator = cluster()
    for verb, arguments in (("drain", ("worker-0",)), ("restart", ("worker-0",))):
        effects = ask(coordinator, verb, *arguments, dry_run=True)
        assert answer(effects).text.startswith("would do: worker-0")
        assert sent(effects, A, B) == []
        assert audited(effects) == []
    assert sent(ask(coordinator, "drain", "worker-0"), A) == [SetCordon(Cordon.EMPTYING)]


def test_requests_are_asked_of_the_gateways() -> None:
    """The rows of all gateways come in one table that names the gateway, once the last one has answered."""
    coordinator = cluster()
    second = Peer("gateway-1", 1)
    coordinator.handle(PeerUp(second, Role.GATEWAY), 0.0)
    effects = ask(coordinator, "requests")
    assert sent(effects, GATEWAY, second) == [Command("1", "requests")] * 2
    assert coordinator.handle(Answer("1", Outcome.DONE, "", (Column("request", ("r1",)),)), 0.1, GATEWAY) == []
    effects = coordinator.handle(Answer("1", Outcome.DONE, "", (Column("request", ("r2",)),)), 0.1, second)
    assert table(answer(effects), "request", "process") == [("r1", "gateway-0"), ("r2", "gateway-1")]


def test_a_silent_process_is_named_and_the_command_may_be_repeated() -> None:
    """After the time for answers the command is refused; a repeat asks again, because nobody knows what was done."""
    coordinator = cluster()
    assert sent(ask(coordinator, "cancel", "r"), GATEWAY) == [Command("1", "cancel", ("r",))]
    assert coordinator.state.next_deadline() is not None
    effects = coordinator.handle(Tick(), 2.0)
    assert (answer(effects).outcome, answer(effects).text) == (Outcome.REFUSED, "gateway-0 has not answered")
    assert sent(ask(coordinator, "cancel", "r", now=3.0), GATEWAY) == [Command("1", "cancel", ("r",))]
    assert coordinator.handle(Answer("1", Outcome.DONE, "r has ended"), 3.1, GATEWAY)[0] == Send(
        CALLER, Answer("1", Outcome.DONE, "r has ended")
    )


def test_a_process_that_dies_ends_the_wait() -> None:
    """A command that waits for a process that goes down is refused at once."""
    coordinator = cluster()
    ask(coordinator, "cancel", "r")
    assert answer(coordinator.handle(PeerDown(GATEWAY), 0.5)).text == "it went down"


def test_a_command_that_is_repeated_while_it_waits_is_answered_where_it_was_repeated() -> None:
    """A console that reconnects gets the answer, and the other processes are not asked again."""
    coordinator = cluster()
    ask(coordinator, "cancel", "r")
    assert coordinator.handle(Command("1", "cancel", ("r",)), 0.1, OTHER) == []
    effects = coordinator.handle(Answer("1", Outcome.DONE, "r has ended"), 0.2, GATEWAY)
    assert answer(effects, OTHER).outcome is Outcome.DONE
    assert sent(effects, CALLER) == []


def test_a_request_moves_only_to_an_open_worker_of_its_kind() -> None:
    """Workers of the destination's kind are asked, with its incarnation; a cordoned destination is refused."""
    coordinator = cluster()
    coordinator.up(Peer("worker-2", 1), kind="other")
    effects = ask(coordinator, "migrate", "r", "worker-1")
    assert sent(effects, A) == [Command("1", "migrate", ("r", "worker-1", "1"))]
    assert sent(effects, B, Peer("worker-2", 1)) == []
    ask(coordinator, "cordon", "worker-1", command_id="2")
    refused = answer(ask(coordinator, "migrate", "r", "worker-1", command_id="3"))
    assert refused.text == "worker-1 takes no requests now: it is cordoned"


def test_commands_and_answers_of_other_processes_are_ignored() -> None:
    """A worker or a gateway cannot command the coordinator, nor answer what it was not asked."""
    coordinator = cluster()
    assert coordinator.handle(Command("1", "drain", ("worker-1",)), 0.0, A) == []
    assert coordinator.handle(Command("1", "drain", ("worker-1",)), 0.0, GATEWAY) == []
    ask(coordinator, "requests")
    assert coordinator.handle(Answer("1", Outcome.DONE), 0.0, A) == []
    assert coordinator.state.num_stale_messages == 3


def test_events_are_numbered_and_read_from_a_number_on() -> None:
    """Workers that come and go, and acts, are events; a reader that knows the last number gets only newer ones."""
    coordinator = cluster()
    ask(coordinator, "cordon", "worker-0")
    coordinator.handle(PeerDown(B), 1.0)
    events = answer(ask(coordinator, "events", command_id="2", now=2.0))
    assert table(events, "number", "event", "subject")[-3:] == [
        (3, "up", "gateway-0"),
        (4, "operator", "local"),
        (5, "down", "worker-1"),
    ]
    assert table(events, "ago_s")[-1] == (1.0,)
    newer = answer(ask(coordinator, "events", "4", command_id="3", now=2.0))
    assert table(newer, "number") == [(5,)]
    assert table(answer(ask(coordinator, "events", "99", command_id="4")), "number")[0] == (1,)


def test_a_drain_without_migration_says_that_requests_stay() -> None:
    """Where migration is switched off, the requests end on the worker, and the answer tells so."""
    text = "worker-0: gets no more requests, and its requests move away"
    assert (
        answer(ask(cluster(), "drain", "worker-0")).text
        == f"{text}; they end there, because migration.enabled is false"
    )
    moving = Coordinator(A, B, migration=PairingConfig(10.0, 20.0, 40.0))
    assert answer(ask(moving, "drain", "worker-0")).text == text


def test_moves_are_events() -> None:
    """The order to move the requests of a worker that is emptied names both workers."""
    coordinator = Coordinator(A, B, migration=PairingConfig(1.0, 2.0, 3.0))
    coordinator.report(A, 900)
    coordinator.report(B, 900)
    ask(coordinator, "drain", "worker-0")
    coordinator.handle(Tick(), 1.0)
    events = answer(ask(coordinator, "events", command_id="2", now=1.0))
    assert table(events, "event", "subject", "text")[-1] == ("move", "worker-0", "to worker-1, up to 100 bytes of KV")


def test_status_hosts_and_top_tell_of_all_workers() -> None:
    """The sums are those of the reports."""
    coordinator = cluster()
    status = {row[0]: row[1] for row in table(answer(ask(coordinator, "status")), "name", "value")}
    assert (status["workers"], status["workers open"], status["gateways"]) == ("2", "2", "1")
    assert table(answer(ask(coordinator, "hosts")), "host", "workers", "running", "gateways") == [
        ("localhost", 2, 2, 1)
    ]
    top = answer(ask(coordinator, "top", now=0.5))
    assert table(top, "worker", "kv_total_bytes", "age_s") == [("worker-0", 1000, 0.5), ("worker-1", 1000, 0.5)]


def test_policies_are_set_within_their_rules() -> None:
    """A bound changes from the next round on; what is unknown, no number, or against the other bounds is refused."""
    coordinator = Coordinator(A, B, migration=PairingConfig(10.0, 20.0, 40.0))
    for setting, value, text in (
        ("migration.source_blow", "5", "cannot be set while the server runs; did you mean migration.source_below?"),
        ("migration.source_below", "x", "expected a number"),
        ("migration.source_below", "30", "migration's bounds must rise"),
        ("migration.max_moves", "0", "expected a whole number from 1"),
        ("scaling.hold_s", "1", "cannot be set"),
    ):
        refused = answer(ask(coordinator, "set", setting, value, command_id=setting + value))
        assert refused.outcome is Outcome.REFUSED
        assert text in refused.text
    ask(coordinator, "set", "migration.source_below", "5", command_id="dry", dry_run=True)
    assert coordinator.state.pairing is not None
    assert coordinator.state.pairing.config.source_below == 10.0
    ask(coordinator, "set", "migration.source_below", "5")
    assert coordinator.state.pairing.config.source_below == 5.0


def test_a_setting_that_is_near_no_other_is_refused_with_all_that_can_be_set() -> None:
    """However long it is, the text holds all names. What is switched off cannot be set."""
    coordinator = Coordinator(A, scaling=ScalingConfig(max_workers=3), migration=PairingConfig())
    for setting in ("nope", "x" * 256):
        text = answer(ask(coordinator, "set", setting, "1", command_id=setting)).text
        assert text == (
            f"{setting[:40]} cannot be set while the server runs; these can: cluster.max_waiting_requests, "
            "migration.source_below/source_until/destination_above/rest_s/max_moves, "
            "scaling.scale_out_below/scale_in_above/hold_s/min_workers"
        )
    off = answer(ask(Coordinator(A, migration=None), "set", "nope", "1")).text
    assert off.endswith("these can: cluster.max_waiting_requests")


def test_scale_runs_as_many_workers_as_the_operator_wants() -> None:
    """Missing ones are started at once, one too many is drained, and ``auto`` leaves the number to the load."""
    coordinator = Coordinator(A, B, scaling=ScalingConfig(max_workers=4, hold_s=1000.0))
    coordinator.report(A, 900)
    coordinator.report(B, 500)
    assert "out of bounds" in answer(ask(coordinator, "scale", "9", command_id="9")).text
    ask(coordinator, "scale", "3", command_id="3")
    effects = [effect for at in (1.0, 2.0, 3.0) for effect in coordinator.handle(Tick(), at)]
    assert effects.count(StartWorker()) == 1
    three = Peer("worker-2", 1)
    coordinator.up(three)
    coordinator.report(three, 1000, 3.5, num_running=0)
    ask(coordinator, "scale", "2", command_id="2")
    assert sent(coordinator.handle(Tick(), 4.0), A, B, three) == [Drain()]
    fixed = answer(ask(cluster(), "scale", "3"))
    assert fixed.text == "the number of workers is fixed, because scaling.max_workers is not set"


def test_reloaded_keys_are_told_in_one_line() -> None:
    """All processes are asked, the coordinator's own shell by an effect, and a name is told once."""
    coordinator = cluster()
    effects = ask(coordinator, "reload-keys")
    assert ReloadKeys(LOCAL, "1") in effects
    assert sent(effects, A, B, GATEWAY) == [Command("1", "reload-keys")] * 3
    for peer, read in ((None, ["keys"]), (A, []), (B, ["keys"])):
        assert coordinator.handle(keys_answer("1", read, []), 0.1, peer) == []
    read_all = answer(coordinator.handle(keys_answer("1", ["keys", "API keys"], []), 0.1, GATEWAY))
    assert (read_all.outcome, read_all.text, read_all.columns) == (Outcome.DONE, "read again: keys, API keys", ())


def test_keys_that_could_not_be_read_are_told_with_their_process() -> None:
    """The act is refused then, and the line tells what was read all the same. A dry run asks no process."""
    coordinator = cluster()
    dry = answer(ask(coordinator, "reload-keys", command_id="dry", dry_run=True))
    assert dry.text == "would do: 4 process(es) read the files of keys again"
    ask(coordinator, "reload-keys")
    coordinator.handle(keys_answer("1", [], ["keys"]), 0.1)
    coordinator.handle(keys_answer("1", ["keys"], ["API keys"]), 0.1, GATEWAY)
    for peer in (A, B):
        effects = coordinator.handle(keys_answer("1", [], []), 0.1, peer)
    failed = answer(effects)
    because = "stayed as before, because of what the log says"
    assert failed.outcome is Outcome.REFUSED
    assert failed.text == f"the coordinator: keys {because}; gateway-0: API keys {because}; read again: keys"


def test_log_levels_reach_every_process_or_one() -> None:
    """The coordinator sets its own as well, and names a process that does not answer."""
    coordinator = cluster()
    effects = ask(coordinator, "log-level", "debug")
    assert SetLogLevel("debug") in effects
    assert sent(effects, A, B, GATEWAY) == [Command("1", "log-level", ("debug",))] * 3
    for peer in (A, GATEWAY):
        coordinator.handle(Answer("1", Outcome.DONE), 0.1, peer)
    assert answer(coordinator.handle(Tick(), 2.0)).text == "worker-1 has not answered"
    one = ask(coordinator, "log-level", "info", "worker-0", command_id="2")
    assert (SetLogLevel("info") in one, sent(one, A, B, GATEWAY)) == (
        False,
        [Command("2", "log-level", ("info", "worker-0"))],
    )
    own = ask(coordinator, "log-level", "info", "coordinator", command_id="3")
    assert answer(own).outcome is Outcome.DONE
    assert "no process x" in answer(ask(coordinator, "log-level", "info", "x", command_id="4")).text
