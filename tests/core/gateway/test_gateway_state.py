"""Scenarios of the gateway's sessions: which worker owns a request, and what its client gets."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Available, Deliver, End, Send
from actorserve.core.gateway.config import GatewayConfig
from actorserve.core.messages import (
    NEWCOMER,
    Attained,
    Close,
    Finished,
    FinishReason,
    HandOver,
    LoadReport,
    Open,
    Peer,
    PeerDown,
    PeerUp,
    Place,
    Placed,
    RefusalReason,
    Refused,
    Release,
    RequestSpec,
    Resend,
    Role,
    Start,
    Started,
    Tick,
    TokenLogprobs,
    Tokens,
    Unplace,
)
from tests.core.harness.gateway import (
    COORDINATOR,
    SPEC,
    A,
    B,
    Gateway,
    make_gateway,
    opened,
    running,
    start,
    tokens,
    up,
)


def test_tokens_reach_the_client_once_and_in_order() -> None:
    """Each token is delivered once; a repeat is dropped."""
    gateway = running(A)
    assert gateway.handle(tokens(1, 0, 7), 0.0, A) == [Deliver("r", (7,), worker=A.name, kind="k")]
    assert gateway.handle(tokens(1, 0, 7), 0.0, A) == []
    assert gateway.handle(tokens(1, 1, 8), 0.0, A) == [Deliver("r", (8,))]


def test_gap_is_asked_for_once_a_retry() -> None:
    """A token that comes too early is not delivered. The gateway asks for the missing tokens, once per retry_s."""
    gateway = running(A)
    assert gateway.handle(tokens(1, 2, 9), 0.0, A) == [Send(A, Resend("r", 1, 0))]
    assert gateway.handle(tokens(1, 3, 9), 0.1, A) == []
    assert gateway.handle(tokens(1, 4, 9), 1.0, A) == [Send(A, Resend("r", 1, 0))]
    many = Tokens(("r",), (1,), (0,), (7, 8), run_lengths=(2,))
    assert gateway.handle(many, 1.1, A) == [Deliver("r", (7, 8), worker=A.name, kind="k")]
    assert gateway.handle(tokens(1, 3, 9), 1.2, A) == [Send(A, Resend("r", 1, 2))]


def test_gap_at_the_next_owner_is_asked_for_at_once() -> None:
    """A request for missing tokens to a dead owner does not delay the one to the next owner."""
    gateway = running(A, B)
    gateway.handle(tokens(1, 2, 9), 0.0, A)
    gateway.handle(PeerDown(A), 0.1)
    gateway.handle(Placed("r", 2, B), 0.1, COORDINATOR)
    assert gateway.handle(tokens(2, 1, 8), 0.2, B) == [Send(B, Resend("r", 2, 0))]


def test_what_the_owner_says_answers_the_start() -> None:
    """If Started was lost, a token or the end shows as well that the request is owned, and Start is not repeated."""
    for said in (tokens(1, 0, 7), Finished("r", 1, FinishReason.STOP, 1)):
        gateway = opened(A)
        gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
        gateway.handle(said, 0.5, A)
        assert gateway.handle(Tick(), 1.0) == []
        assert gateway.state.next_deadline() is None


def test_a_second_answer_does_not_move_a_request() -> None:
    """A repeated Place may be answered with another instance: the first answer counts, the other is undone."""
    gateway = opened(A, B)
    assert gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR) == [Send(A, start(1))]
    assert gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR) == []
    assert gateway.handle(Placed("r", 1, B), 0.0, COORDINATOR) == [Send(COORDINATOR, Unplace("r", 1))]
    gateway.handle(Started("r", 1), 0.0, A)
    assert gateway.handle(Placed("r", 1, B), 0.0, COORDINATOR) == [Send(COORDINATOR, Unplace("r", 1))]
    assert gateway.state.sessions["r"].instance == A


def test_a_request_may_begin_with_output() -> None:
    """A request that is opened with tokens continues after them; they are not delivered again."""
    gateway = opened(A)
    gateway.handle(Close("r"), 0.0)
    effects = gateway.handle(Open(replace(SPEC, output_token_ids=(7,))), 0.0)
    assert effects == [Send(COORDINATOR, Place("r", 1, 4))]
    assert gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR) == [Send(A, start(1, output=(7,)))]
    assert gateway.handle(tokens(1, 1, 8), 0.0, A) == [Deliver("r", (8,), worker=A.name, kind="k")]


def test_end_comes_after_the_last_token() -> None:
    """If Finished precedes the last token, the gateway asks for that token. Then the request ends, once."""
    gateway = running(A)
    finished = Finished("r", 1, FinishReason.STOP, 1)
    assert gateway.handle(finished, 0.0, A) == [Send(A, Resend("r", 1, 0))]
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    assert gateway.handle(finished, 0.0, A) == [Send(A, Release("r", 1)), End("r", FinishReason.STOP)]
    assert gateway.handle(finished, 0.0, A) == [Send(A, Release("r", 1))]
    assert not gateway.state.sessions


def test_dead_worker_costs_an_epoch_and_no_token() -> None:
    """Another worker, of the same kind if possible, continues from the tokens that the client has."""
    gateway = running(A, B)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    place = Place("r", 2, 4, kind="k", avoid=A, waited_s=1.0)
    assert gateway.handle(PeerDown(A), 1.0) == [Send(COORDINATOR, place)]
    assert gateway.handle(Placed("r", 2, B), 1.0, COORDINATOR) == [Send(B, start(2, output=(7,), waited_s=1.0))]
    assert gateway.handle(tokens(2, 1, 8), 1.0, B) == [Deliver("r", (8,), worker=B.name, kind="k")]


def test_a_long_life_does_not_count_as_waiting() -> None:
    """A request that fails over after minutes still has all of no_instance_timeout_s to find its next owner."""
    gateway = running(A)
    gateway.handle(PeerDown(A), 100.0)
    assert gateway.handle(Tick(), 101.0) == [Send(COORDINATOR, Place("r", 2, 3, avoid=A, waited_s=100.0))]
    assert gateway.handle(Tick(), 130.0) == [
        Send(COORDINATOR, Unplace("r", 2)),
        End("r", FinishReason.ERROR, RefusalReason.NO_INSTANCE, 1.0),
    ]


def test_half_an_answer_waits_longer_for_its_rest() -> None:
    """A stream that has begun survives the minutes that its only worker takes to load again."""
    gateway = running(A)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    gateway.handle(PeerDown(A), 100.0)
    assert gateway.handle(Tick(), 160.0) == [Send(COORDINATOR, Place("r", 2, 4, kind="k", avoid=A, waited_s=100.0))]
    assert gateway.handle(Tick(), 700.0)[-1] == End("r", FinishReason.ERROR, RefusalReason.NO_INSTANCE, 1.0)


def test_old_epoch_is_fenced() -> None:
    """An owner that was thought dead is told to release the request, and all of its messages are ignored."""
    gateway = running(A, B)
    gateway.handle(PeerDown(A), 1.0)
    gateway.handle(Placed("r", 2, B), 1.0, COORDINATOR)
    assert gateway.handle(tokens(1, 0, 99), 1.0, A) == [Send(A, Release("r", 1))]
    assert gateway.handle(tokens(1, 0, 99), 1.0, B) == [Send(B, Release("r", 1))]
    assert gateway.handle(tokens(2, 0, 99), 1.0, A) == [Send(A, Release("r", 2))]
    assert gateway.handle(Finished("r", 1, FinishReason.STOP, 0), 1.0, A) == [Send(A, Release("r", 1))]
    assert gateway.state.sessions["r"].output == []


def test_an_answer_for_an_old_epoch_is_undone() -> None:
    """The coordinator is told to forget a placement that comes too late."""
    gateway = running(A, B)
    gateway.handle(PeerDown(A), 1.0)
    assert gateway.handle(Placed("r", 1, B), 1.0, COORDINATOR) == [Send(COORDINATOR, Unplace("r", 1))]


def test_unanswered_messages_are_sent_again() -> None:
    """Place and Start are repeated every retry_s until they are answered."""
    gateway = opened(A)
    assert gateway.state.next_deadline() == 1.0
    assert gateway.handle(Tick(), 1.0) == [Send(COORDINATOR, Place("r", 1, 3))]
    gateway.handle(Placed("r", 1, A), 1.5, COORDINATOR)
    assert gateway.state.next_deadline() == 2.0
    assert gateway.handle(Tick(), 2.0) == []
    assert gateway.state.next_deadline() == 2.5
    assert gateway.handle(Tick(), 2.5) == [Send(A, start(1))]
    gateway.handle(Started("r", 1), 2.6, A)
    gateway.handle(Tick(), 3.5)
    assert gateway.state.next_deadline() is None


def test_placement_on_a_worker_not_met_yet_starts_when_it_is_met() -> None:
    """The coordinator may know a worker before this gateway does; the worker's PeerUp starts the request."""
    gateway = opened()
    assert gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR) == []
    assert gateway.handle(up(A), 0.1) == [Available(), Send(A, start(1))]


def test_first_worker_makes_the_gateway_available_once() -> None:
    """The gateway says once that it can serve; later workers change nothing."""
    gateway = make_gateway()
    assert gateway.handle(up(A), 0.0) == [Available()]
    assert gateway.handle(up(B), 0.0) == []


def test_new_coordinator_is_asked_at_once() -> None:
    """A new coordinator is asked for every request without a worker; running requests are not affected."""
    gateway = opened(A)
    gateway.handle(PeerDown(COORDINATOR), 0.5)
    assert gateway.handle(Tick(), 1.0) == []
    new = Peer("coordinator", 2)
    assert gateway.handle(PeerUp(new, Role.COORDINATOR), 1.6) == [Send(new, Place("r", 1, 3))]
    gateway.handle(Placed("r", 1, A), 1.7, new)
    gateway.handle(Started("r", 1), 1.7, A)
    assert gateway.handle(PeerDown(new), 1.8) == []
    assert gateway.handle(tokens(1, 0, 7), 1.9, A) == [Deliver("r", (7,), worker=A.name, kind="k", queued_s=1.7)]


def test_close_leaves_nothing_behind() -> None:
    """When a client leaves, the coordinator or the worker that has its request is told to drop it."""
    gateway = opened(A)
    assert gateway.handle(Close("r"), 0.0) == [Send(COORDINATOR, Unplace("r", 1))]
    gateway = running(A)
    assert gateway.handle(Close("r"), 0.0) == [Send(A, Release("r", 1))]
    assert gateway.handle(Close("r"), 0.0) == []
    assert not gateway.state.sessions


def test_a_request_that_ends_before_its_handoff_leaves_its_token_instance() -> None:
    """The coordinator keeps no room at the token instance for it. For one that has arrived, it keeps none already."""
    gateway = opened(A, B)
    gateway.handle(Placed("r", 1, A, token_instance=B), 0.0, COORDINATOR)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    assert gateway.handle(Finished("r", 1, FinishReason.STOP, 1), 0.1, A) == [
        Send(COORDINATOR, Unplace("r", 1)),
        Send(A, Release("r", 1)),
        End("r", FinishReason.STOP),
    ]
    gateway = opened(A, B)
    gateway.handle(Placed("r", 1, A, token_instance=B), 0.0, COORDINATOR)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    gateway.handle(HandOver("r", 1, B, None, 1, NEWCOMER), 0.1, A)
    gateway.handle(tokens(2, 1, 8), 0.2, B)
    assert gateway.handle(Close("r"), 0.3) == [Send(B, Release("r", 2))]


def test_the_worker_hears_that_an_answer_is_complete() -> None:
    """The release of an answer that a stop string ended says so, and later ones do not."""
    gateway = running(A)
    assert gateway.handle(Close("r", is_complete=True), 0.0) == [Send(A, Release("r", 1, is_complete=True))]
    assert gateway.handle(tokens(1, 0, 7), 0.1, A) == [Send(A, Release("r", 1))]


def test_refusals_end_the_request_with_their_reason() -> None:
    """A refused request ends as an error that says why, and when to retry."""
    gateway = opened(A)
    effects = gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 2.0), 0.0, COORDINATOR)
    assert effects == [End("r", FinishReason.ERROR, RefusalReason.OVERLOADED, 2.0)]


def test_a_draining_worker_means_another_worker() -> None:
    """A worker that drains refuses a request, which then asks for another worker."""
    gateway = opened(A)
    gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
    effects = gateway.handle(Refused("r", 1, RefusalReason.DRAINING, 1.0), 0.0, A)
    assert effects == [Send(A, Release("r", 1)), Send(COORDINATOR, Place("r", 2, 3, avoid=A))]


def test_attained_service_travels_with_the_request() -> None:
    """What a worker that gives the request back says of it reaches the next worker; what a dead worker knew is lost.

    The request's age counts at all of them, whichever of them died.
    """
    gateway = running(A, B)
    had = Attained(service_s=3.0, quantum_s=2.0, quantum_used_s=1.0, waited_s=0.25, expected_tokens=9.0)
    gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0, had), 1.0, A)
    (sent,) = gateway.handle(Placed("r", 2, B, waited_s=0.5), 2.0, COORDINATOR)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Start)
    assert sent.message.attained == replace(had, waited_s=1.0 + 0.5, age_s=1.0 + 0.5)
    gateway.handle(PeerDown(B), 4.0)
    (sent,) = gateway.handle(Placed("r", 3, A), 4.0, COORDINATOR)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Start)
    assert sent.message.attained == Attained(waited_s=4.0, age_s=4.0)


def test_a_worker_without_room_means_another_worker() -> None:
    """After a refusal for lack of memory a request asks at once for another worker, and its retries for any."""
    gateway = opened(A)
    gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
    full = Refused("r", 1, RefusalReason.OVERLOADED, 1.0)
    assert gateway.handle(full, 0.5, A) == [
        Send(A, Release("r", 1)),
        Send(COORDINATOR, Place("r", 2, 3, avoid=A, waited_s=0.5)),
    ]
    assert gateway.handle(full, 0.6, A) == [Send(A, Release("r", 1))]
    assert gateway.handle(Tick(), 1.5) == [Send(COORDINATOR, Place("r", 2, 3, waited_s=0.5))]
    assert gateway.handle(Placed("r", 2, A, 1.0), 1.5, COORDINATOR) == [Send(A, start(2, waited_s=1.5))]


def test_a_preempted_request_that_is_refused_keeps_its_tokens() -> None:
    """A preempted request that its worker refuses continues elsewhere from the tokens that its client has."""
    gateway = running(A, B)
    gateway.handle(tokens(1, 0, 7), 1.0, A)
    effects = gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0), 3.0, A)
    assert effects == [Send(A, Release("r", 1)), Send(COORDINATOR, Place("r", 2, 4, kind="k", avoid=A, waited_s=2.0))]
    assert gateway.handle(tokens(1, 1, 8), 3.1, A) == [Send(A, Release("r", 1))]
    placed = Placed("r", 2, B, waited_s=0.25)
    assert gateway.handle(placed, 3.25, COORDINATOR) == [Send(B, start(2, output=(7,), waited_s=2.25, age_s=3.25))]
    assert gateway.handle(tokens(2, 1, 8), 4.0, B) == [Deliver("r", (8,), worker=B.name, kind="k")]


def test_tokens_renew_the_patience() -> None:
    """A request that has to move has its whole patience again after its last token."""
    gateway = running(A)
    gateway.handle(tokens(1, 0, 7), 700.0, A)
    gateway.handle(Refused("r", 1, RefusalReason.OVERLOADED, 1.0), 701.0, A)
    assert gateway.handle(Tick(), 1299.0) == [Send(COORDINATOR, Place("r", 2, 4, kind="k", waited_s=1.0))]
    assert gateway.handle(Tick(), 1300.0)[-1] == End("r", FinishReason.ERROR, RefusalReason.OVERLOADED, 60.0)


def test_repeated_refusals_for_room_end_with_the_patience() -> None:
    """Workers that accept a request and then give it up do not renew its patience; it ends as overload."""
    gateway = running(A)
    for second in range(1, 30):
        gateway.handle(Refused("r", second, RefusalReason.OVERLOADED, 1.0), float(second), A)
        gateway.handle(Placed("r", second + 1, A), float(second), COORDINATOR)
        gateway.handle(Started("r", second + 1), float(second), A)
    gateway.handle(Refused("r", 30, RefusalReason.OVERLOADED, 1.0), 29.5, A)
    assert gateway.handle(Tick(), 30.5) == [
        Send(COORDINATOR, Unplace("r", 31)),
        End("r", FinishReason.ERROR, RefusalReason.OVERLOADED, 30.5),
    ]


def test_too_large_for_its_worker_ends_only_requests_without_output() -> None:
    """A request that is too large for its worker ends, unless its client has half an answer; then others are tried."""
    gateway = opened(A)
    gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
    large = Refused("r", 1, RefusalReason.TOO_LARGE, 1.0)
    ended = End("r", FinishReason.ERROR, RefusalReason.TOO_LARGE, 1.0)
    assert gateway.handle(large, 0.5, A) == [Send(A, Release("r", 1)), ended]
    gateway = running(A)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    place = Place("r", 2, 4, kind="k", avoid=A, waited_s=0.5)
    assert gateway.handle(large, 0.5, A) == [Send(A, Release("r", 1)), Send(COORDINATOR, place)]


def test_patience_ends_in_overload_while_workers_are_up() -> None:
    """A request that no worker admitted in time ends as overload, to be retried after its wait or a minute."""
    gateway = opened(A)
    assert gateway.handle(Tick(), 30.0) == [
        Send(COORDINATOR, Unplace("r", 1)),
        End("r", FinishReason.ERROR, RefusalReason.OVERLOADED, 30.0),
    ]
    gateway = opened(A)
    assert gateway.handle(Tick(), 90.0)[-1] == End("r", FinishReason.ERROR, RefusalReason.OVERLOADED, 60.0)


def test_workers_that_drain_do_not_count_as_up() -> None:
    """If all workers drain, patience ends with the reason that there is no instance."""
    gateway = opened(A)
    gateway.handle(LoadReport(1, 1, 0, 800, 100, 100, 100, 4, 0, draining=True), 0.0, A)
    assert gateway.handle(Tick(), 30.0)[-1] == End("r", FinishReason.ERROR, RefusalReason.NO_INSTANCE, 1.0)


def test_the_time_in_the_coordinators_queue_travels_with_the_request() -> None:
    """The time in the queue counts at the worker, even if Start has to be repeated."""
    gateway = opened(A)
    assert gateway.handle(Placed("r", 1, A, 0.75), 0.8, COORDINATOR) == [Send(A, start(1, waited_s=0.75))]
    assert gateway.handle(Tick(), 1.8) == [Send(A, start(1, waited_s=0.75))]


def test_half_an_answer_is_not_dropped_for_overload() -> None:
    """A request in mid-stream waits out an overload instead of failing."""
    gateway = running(A)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    gateway.handle(PeerDown(A), 1.0)
    assert gateway.handle(Refused("r", 2, RefusalReason.OVERLOADED, 1.0), 1.0, COORDINATOR) == []
    assert gateway.handle(Tick(), 2.0) == [Send(COORDINATOR, Place("r", 2, 4, kind="k", avoid=A, waited_s=1.0))]


def test_half_an_answer_waits_for_an_instance_of_its_size() -> None:
    """A request that only its dead worker could hold is not refused while that worker may come back."""
    gateway = running(A)
    gateway.handle(tokens(1, 0, 7), 0.0, A)
    gateway.handle(PeerDown(A), 1.0)
    assert gateway.handle(Refused("r", 2, RefusalReason.TOO_LARGE, 1.0), 1.0, COORDINATOR) == []
    assert "r" in gateway.state.sessions


def test_a_worker_met_again_is_no_longer_avoided() -> None:
    """A worker that was lost and comes up as the same incarnation may get its request again."""
    gateway = running(A)
    assert gateway.handle(PeerDown(A), 1.0) == [Send(COORDINATOR, Place("r", 2, 3, avoid=A, waited_s=1.0))]
    assert gateway.handle(up(A), 1.5) == [Send(COORDINATOR, Place("r", 2, 3, waited_s=1.0))]
    assert gateway.handle(Placed("r", 2, A), 1.5, COORDINATOR) == [Send(A, start(2, waited_s=1.0))]


def test_a_refusal_counts_only_for_the_current_epoch() -> None:
    """A refusal of an older epoch, or of a request that runs, changes nothing."""
    gateway = running(A, B)
    assert gateway.handle(Refused("r", 1, RefusalReason.NO_INSTANCE, 1.0), 0.5, COORDINATOR) == []
    gateway.handle(PeerDown(A), 1.0)
    assert gateway.handle(Refused("r", 1, RefusalReason.NO_INSTANCE, 1.0), 1.0, COORDINATOR) == []
    assert gateway.state.sessions["r"].epoch == 2
    assert gateway.state.counts.num_stale_messages == 2


def test_a_client_that_leaves_while_its_request_starts() -> None:
    """Between Start and Started both the coordinator and the worker are told to drop the request."""
    gateway = opened(A)
    gateway.handle(Placed("r", 1, A), 0.0, COORDINATOR)
    assert gateway.handle(Close("r"), 0.0) == [Send(COORDINATOR, Unplace("r", 1)), Send(A, Release("r", 1))]


def test_thousands_of_waiting_requests_cost_few_ticks() -> None:
    """Retries that come due soon after one another share a tick, and each request is retried once per retry_s."""
    gateway = make_gateway(1e9, 1e9)
    gateway.handle(PeerUp(COORDINATOR, Role.COORDINATOR), 0.0)
    for number in range(1000):
        gateway.handle(Open(RequestSpec(f"r{number}", (1,), SPEC.sampling)), number / 1000)
    num_ticks = num_places = 0
    while (deadline := gateway.state.next_deadline()) is not None and deadline < 3.0:
        num_ticks += 1
        num_places += len(gateway.handle(Tick(), deadline))
    assert num_ticks < 20
    assert 2000 <= num_places < 2500


def test_load_reports_are_kept_while_their_worker_is_up() -> None:
    """The last report of a worker is known until the worker goes down. A report that comes afterwards counts no more,
    because nothing would ever forget it.
    """
    gateway = running(A)
    report = LoadReport(1, 1, 0, 800, 100, 100, 100, 4, 0)
    assert gateway.handle(report, 0.0, A) == []
    assert gateway.state.peers.loads == {A: report}
    gateway.handle(PeerDown(A), 1.0)
    gateway.handle(report, 1.0, A)
    assert gateway.state.peers.loads == {}


def test_no_instance_ends_in_an_error() -> None:
    """With no coordinator and no worker for no_instance_timeout_s the client gets an error, not silence."""
    gateway = make_gateway()
    assert gateway.handle(Open(SPEC), 0.0) == []
    assert gateway.handle(Tick(), 1.0) == []
    assert gateway.handle(Tick(), 30.0) == [End("r", FinishReason.ERROR, RefusalReason.NO_INSTANCE, 1.0)]


def test_logprobs_stay_with_their_tokens() -> None:
    """Log-probabilities are delivered with their tokens."""
    gateway = running(A)
    entry = TokenLogprobs(-0.1, (), ())
    assert gateway.handle(tokens(1, 0, 7, (entry,)), 0.0, A) == [Deliver("r", (7,), (entry,), worker=A.name, kind="k")]


def test_cached_tokens_come_with_the_first_token() -> None:
    """The number of cached tokens is delivered once, with output position 0, in whatever row that is."""
    gateway = running(A)
    rows = Tokens(("x", "r"), (1, 1), (0, 0), (7, 8, 9), (), (5, 2), run_lengths=(1, 2))
    assert gateway.handle(rows, 1.0, A)[-1] == Deliver("r", (8, 9), (), 2, worker=A.name, kind="k")
    assert gateway.handle(tokens(1, 2, 7), 1.0, A) == [Deliver("r", (7,))]


@pytest.mark.parametrize("prefix_aware", [True, False])
def test_prefixes_are_named_only_for_instances_that_cache_them(prefix_aware: bool) -> None:
    """Without a prefix cache a prompt is not hashed, and its place message names no prefixes."""
    gateway = Gateway(GatewayConfig(prefix_aware=prefix_aware))
    gateway.handle(PeerUp(COORDINATOR, Role.COORDINATOR), 0.0)
    [effect] = gateway.handle(Open(replace(SPEC, prompt_token_ids=tuple(range(200)))), 0.0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Place)
    assert len(effect.message.prefix_names) == (3 if prefix_aware else 0)


def test_takeovers_are_counted() -> None:
    """A coordinator in a newer term has taken over; the first one, and the same one again, have not."""
    gateway = make_gateway()
    for term, expected in ((10, 0), (10, 0), (21, 1), (30, 2)):
        peer = Peer(f"coordinator of {term}", 1)
        gateway.handle(PeerUp(peer, Role.COORDINATOR, None, term), 0.0)
        assert (gateway.state.counts.num_takeovers, gateway.state.peers.term) == (expected, term)
        gateway.handle(PeerDown(peer), 0.0)
    assert gateway.state.peers.coordinator is None
