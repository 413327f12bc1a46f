"""Scenarios of one instance: given these messages at these times, exactly these effects."""

from dataclasses import replace

import pytest

from actorserve.core.effects import AddToEngine, Drained, DropFromEngine, RunStep, Send
from actorserve.core.messages import (
    NOTHING_SPENT,
    Drain,
    Finished,
    FinishReason,
    LoadReport,
    Peer,
    PeerDown,
    PeerUp,
    RefusalReason,
    Refused,
    Release,
    Resend,
    Role,
    Start,
    Started,
    StepDone,
    StepPlan,
    Tick,
    TokenLogprobs,
    Tokens,
    WantReports,
)
from tests.core.harness.driver import CONFIG, GATEWAY, PROFILE, Instance, spec

COORDINATOR = Peer("coordinator", 1)


def test_request_runs_from_start_to_release() -> None:
    """A request is acknowledged, prefilled, decoded, finished and, once released, forgotten."""
    instance = Instance()
    effects = instance.start(spec("a", 6, max_tokens=2))
    assert effects[0] == Send(GATEWAY, Started("a", 1))
    assert isinstance(effects[1], AddToEngine)
    assert instance.plan == StepPlan(1, ("a",), (0,), ((0, 1, 2, 3, 4, 5),), ((0, 1),), (True,))
    assert instance.done()[0] == Send(GATEWAY, Tokens(("a",), (1,), (0,), (9,)))
    assert instance.plan == StepPlan(2, ("a",), (6,), ((9,),), ((0, 1),), (True,))
    effects = instance.done()
    assert Send(GATEWAY, Finished("a", 1, FinishReason.LENGTH, 2)) in effects
    assert DropFromEngine("a") in effects
    assert instance.state.memory.device.num_free_blocks == 8
    assert "a" in instance.state.outbox
    instance.handle(Release("a", 1))
    assert not instance.state.outbox


def test_prefill_chunks_share_the_iteration_with_decodes() -> None:
    """Decodes come first, and a prefill gets what is left of the iteration's tokens."""
    instance = Instance()
    instance.start(spec("a", 3))
    instance.start(spec("b", 12))
    instance.done()
    plan = instance.plan
    assert plan is not None
    assert plan.request_ids == ("a", "b")
    assert [len(tokens) for tokens in plan.token_ids] == [1, 7]
    assert plan.samples == (True, False)
    instance.done()
    plan = instance.plan
    assert plan is not None
    assert plan.starts == (4, 7)
    assert plan.samples == (True, True)


def test_stop_token_ends_the_request_but_not_before_min_tokens() -> None:
    """A stop token ends the answer, unless fewer than min_tokens came before it."""
    instance = Instance()
    instance.start(spec("a", 2, max_tokens=4, stop_token_ids=(9,), min_tokens=1))
    instance.done(token=9)
    assert "a" in instance.state.requests
    instance.done(token=9)
    assert instance.sent[-1] == Finished("a", 1, FinishReason.STOP, 2)


def test_the_context_ends_the_request() -> None:
    """Prompt and output together never exceed the instance's context, whatever max_tokens says."""
    instance = Instance()
    instance.start(spec("a", 30, max_tokens=100))
    while "a" in instance.state.requests:
        instance.done()
    assert instance.sent[-1] == Finished("a", 1, FinishReason.LENGTH, 2)


def test_growth_preempts_the_least_urgent_and_recomputes_it() -> None:
    """When blocks run out, the last request to arrive loses its own to an earlier one, and restarts from nothing."""
    config = replace(CONFIG, num_blocks=4, max_context_tokens=16)
    instance = Instance(config)
    instance.start(spec("a", 4, max_tokens=12))
    instance.start(spec("b", 3, max_tokens=2))
    while instance.state.batcher.num_preemptions == 0:
        instance.done()
        if not instance.state.requests:
            pytest.fail("no request was preempted")
        if "b" in instance.state.outbox:
            instance.handle(Release("b", 1))
            instance.start(replace(spec("b", 3, max_tokens=9)), epoch=2)
    preempted = instance.state.requests["b"]
    assert preempted.blocks == []
    assert preempted.num_computed == 0
    assert instance.state.requests["a"].is_started


def test_head_of_the_line_blocks_those_behind_it() -> None:
    """First come, first served: a small request does not overtake a big one that waits for blocks."""
    instance = Instance()
    instance.start(spec("a", 20, max_tokens=4))
    instance.start(spec("b", 16))
    instance.start(spec("c", 1))
    assert [r.is_started for r in instance.state.requests.values()] == [True, False, False]


def test_admission_leaves_a_block_for_each_running_request() -> None:
    """A new request waits if the next growth of the running requests would preempt it again."""
    instance = Instance()
    instance.start(spec("a", 3))
    instance.start(spec("b", 28))
    instance.done()
    assert instance.state.memory.device.num_free_blocks == 7
    assert not instance.state.requests["b"].is_started
    instance.handle(Release("a", 1))
    instance.done()
    assert instance.state.requests["b"].is_started


def test_a_batch_is_bounded_in_requests() -> None:
    """Beyond max_batch_requests a request waits, even if blocks and tokens are left."""
    instance = Instance(replace(CONFIG, max_batch_requests=2))
    for name in "abc":
        instance.start(spec(name, 2))
    instance.done()
    assert [r.is_started for r in instance.state.requests.values()] == [True, True, False]


def test_release_during_a_step_drops_its_output() -> None:
    """No other request gets the blocks of a request released during an iteration before the iteration ends."""
    instance = Instance()
    instance.start(spec("a", 6))
    instance.handle(Release("a", 1))
    assert instance.state.memory.device.num_free_blocks == 6
    assert not [e for e in instance.start(spec("b", 6)) if isinstance(e, RunStep)]
    assert [type(e) for e in instance.done()] == [RunStep]


def test_newer_epoch_replaces_and_older_is_dropped() -> None:
    """A request's newest epoch wins: a repeat is answered again, an older epoch changes nothing."""
    instance = Instance()
    instance.start(spec("a", 6), epoch=2)
    assert instance.start(spec("a", 6), epoch=2) == [Send(GATEWAY, Started("a", 2))]
    assert instance.start(spec("a", 6), epoch=1) == []
    assert instance.state.num_stale_messages == 1
    instance.handle(Release("a", 1))
    assert "a" in instance.state.requests
    instance.start(spec("a", 6), epoch=3)
    assert instance.state.requests["a"].epoch == 3
    instance.sent.clear()
    instance.done()  # the old epoch's step
    assert instance.sent == []
    assert instance.state.requests["a"].num_output == 0


def test_resumed_request_goes_on_from_its_tokens() -> None:
    """After a failover prompt and output are prefilled together, and output positions continue."""
    instance = Instance()
    instance.start(replace(spec("a", 3, max_tokens=4), output_token_ids=(5, 6)), epoch=2)
    plan = instance.plan
    assert plan is not None
    assert plan.token_ids == ((0, 1, 2, 5, 6),)
    assert instance.done()[0] == Send(GATEWAY, Tokens(("a",), (2,), (2,), (9,)))


def test_resumed_request_that_was_complete_finishes_at_once() -> None:
    """If the last owner died after the last token and before Finished, the next owner sends Finished at once."""
    instance = Instance()
    instance.start(replace(spec("a", 3, max_tokens=2), output_token_ids=(5, 6)), epoch=2)
    assert instance.plan is None
    assert instance.sent == [Started("a", 2), Finished("a", 2, FinishReason.LENGTH, 2)]


def test_resend_repeats_what_was_lost_with_its_logprobs() -> None:
    """Lost tokens come again from the position asked for, and so does the end."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=3, top_logprobs=0))
    entries = [TokenLogprobs(-float(i), (), ()) for i in range(3)]
    for i in range(3):
        plan = instance.plan
        assert plan is not None
        instance.handle(StepDone(plan.step_id, 0.0, ("a",), (i,), (20 + i,), (entries[i],)))
    instance.sent.clear()
    instance.handle(Resend("a", 1, 1))
    assert instance.sent == [
        Tokens(("a",), (1,), (1,), (21, 22), (entries[1], entries[2]), run_lengths=(2,)),
        Finished("a", 1, FinishReason.LENGTH, 3),
    ]


def test_resend_knows_only_what_was_made_here_under_this_epoch() -> None:
    """Tokens that came with the request are not repeated, and a Resend of another epoch changes nothing."""
    instance = Instance()
    instance.start(replace(spec("a", 3, top_logprobs=0), output_token_ids=(5, 6)), epoch=2)
    entry = TokenLogprobs(-0.5, (), ())
    instance.handle(StepDone(1, 0.0, ("a",), (2,), (7,), (entry,)))
    instance.sent.clear()
    instance.handle(Resend("a", 1, 0))
    assert instance.sent == []
    assert instance.state.num_stale_messages == 1
    instance.handle(Resend("a", 2, 0))
    assert instance.sent == [Tokens(("a",), (2,), (2,), (7,), (entry,))]


@pytest.mark.parametrize("from_position", [1, 7])
def test_resend_of_tokens_that_do_not_exist_sends_none(from_position: int) -> None:
    """A Resend from the output's end on, or from behind it, gets no message."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=8))
    instance.done()
    instance.sent.clear()
    instance.handle(Resend("a", 1, from_position))
    assert instance.sent == []


def test_a_request_that_can_get_no_token_ends_alone() -> None:
    """A request that the engine reports as failed ends with an error and its tokens so far; its neighbour goes on."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=5))
    instance.start(spec("b", 3, max_tokens=5))
    while len(instance.plan.request_ids if instance.plan else ()) < 2:
        instance.done()
    plan = instance.plan
    assert plan is not None
    outputs = {request.request_id: request.num_output for request in instance.state.requests.values()}
    instance.sent.clear()
    instance.handle(StepDone(plan.step_id, 0.0, ("b",), (outputs["b"],), (7,), failed=("a",)))
    assert instance.sent == [
        Tokens(("b",), (1,), (outputs["b"],), (7,)),
        Finished("a", 1, FinishReason.ERROR, outputs["a"]),
    ]
    assert DropFromEngine("a") in instance.effects
    assert instance.plan is not None
    assert instance.plan.request_ids == ("b",)
    instance.handle(Release("a", 1))
    while instance.state.requests:
        instance.done()
    assert instance.sent[-1] == Finished("b", 1, FinishReason.LENGTH, 5)
    assert instance.state.memory.device.num_free_blocks == CONFIG.num_blocks


def test_too_large_and_draining_are_refused() -> None:
    """Requests that can never fit, and all requests during a drain, are refused and leave nothing behind."""
    instance = Instance()
    instance.start(spec("a", 33))
    assert instance.sent == [Refused("a", 1, RefusalReason.TOO_LARGE, 1.0, energy=NOTHING_SPENT)]
    instance.handle(Drain())
    instance.start(spec("b", 3))
    assert instance.sent[-1] == Refused("b", 1, RefusalReason.DRAINING, 1.0, energy=NOTHING_SPENT)
    assert not instance.state.requests
    assert instance.plan is None


def test_drain_ends_when_the_last_request_is_released() -> None:
    """A draining instance finishes its requests, and reports once that none is left."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=1))
    assert Drained() not in instance.handle(Drain())
    assert Drained() not in instance.done()
    assert instance.handle(Release("a", 1)) == [Drained()]
    assert instance.handle(Release("a", 1)) == []


def test_dead_gateway_frees_all_of_its_requests() -> None:
    """A dead gateway's requests are forgotten, including finished ones; other gateways' requests stay."""
    instance = Instance()
    instance.start(spec("a", 6))
    instance.handle(Start(1, spec("b", 6)), sender=Peer("gateway-1", 1))
    instance.done()
    instance.handle(PeerDown(GATEWAY))
    assert list(instance.state.requests) == ["b"]
    instance.done()
    assert instance.state.memory.device.num_free_blocks == 8 - 2


def test_load_reports_are_numbered_and_name_what_arrived() -> None:
    """A new listener hears the load at once, then every load_report_s, with the requests that arrived since."""
    instance = Instance()
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    assert instance.sent == [LoadReport(0, 0, 0, 800, 0, 0, 100, 4, 0)]
    instance.start(spec("a", 6))
    instance.start(spec("b", 29, max_tokens=2))
    instance.sent.clear()
    assert instance.state.next_deadline() == 0.5
    instance.handle(Tick(), now=0.5)
    # a holds 2 blocks; b heads the line and demands 8.
    assert instance.sent == [
        LoadReport(
            1,
            1,
            1,
            800,
            200,
            1000,
            100,
            4,
            0,
            ("a", "b"),
            num_in_batch=1,
            num_tokens_looked_up=6,
            kv_needed_bytes=200,
            kv_wanted_bytes=800,
            kv_head_bytes=800,
            pending_prompt_tokens=35,  # those that the iteration in flight computes, too
            decode_s=PROFILE.decode_s(1, 8),
        )
    ]


def test_gateways_get_reports_while_they_want_them() -> None:
    """A gateway that asks hears the load at once, and then as often as the coordinator does, until it is not wanted any
    more or the gateway goes down.
    """
    instance = Instance()
    assert instance.handle(PeerUp(GATEWAY, Role.GATEWAY)) == []
    load = LoadReport(0, 0, 0, 800, 0, 0, 100, 4, 0)
    assert instance.handle(WantReports(True), 0.0, GATEWAY) == [Send(GATEWAY, load)]
    assert instance.handle(Tick(), 0.5) == [Send(GATEWAY, replace(load, sequence=1))]
    instance.handle(WantReports(False), 0.6, GATEWAY)
    assert instance.handle(Tick(), 1.0) == []
    instance.handle(WantReports(True), 1.1, GATEWAY)
    instance.handle(PeerDown(GATEWAY), 1.2)
    assert instance.handle(Tick(), 2.0) == []
    assert instance.state.next_deadline() is None


def test_load_reports_tell_what_the_whole_line_demands() -> None:
    """The demand of all waiting requests is told, and that of the first of them, which virtual usage counts."""
    instance = Instance()
    for name, num_prompt in (("a", 6), ("b", 29), ("c", 12)):
        instance.start(spec(name, num_prompt, max_tokens=2))
    report = instance.state.load_report()
    assert (report.num_running, report.num_waiting) == (1, 2)
    assert (report.kv_head_bytes, report.kv_wanted_bytes) == (800, 1100)
    assert report.virtual_usage_bytes == report.kv_needed_bytes + 800


def test_load_reports_tell_what_is_left_of_prompts() -> None:
    """A prompt counts until it is computed, chunk by chunk; a request that decodes does not count."""
    instance = Instance()
    instance.start(spec("a", 20, max_tokens=3))
    pending = [instance.state.load_report().pending_prompt_tokens]
    while instance.state.steps.in_flight:
        instance.done()
        pending.append(instance.state.load_report().pending_prompt_tokens)
    assert pending[0] == 20
    assert pending == sorted(pending, reverse=True)
    assert pending[-3:] == [0, 0, 0]


def test_reports_end_with_the_last_listener_and_begin_again() -> None:
    """Without listeners there is no deadline, and only the incarnation that died is forgotten."""
    instance = Instance()
    again = Peer("coordinator", 2)
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    instance.handle(PeerUp(again, Role.COORDINATOR), now=0.2)
    instance.handle(PeerDown(COORDINATOR), now=0.2)
    assert instance.handle(Tick(), now=0.5) == [Send(again, LoadReport(1, 0, 0, 800, 0, 0, 100, 4, 0))]
    instance.handle(PeerDown(again), now=0.6)
    assert instance.handle(Tick(), now=1.0) == []
    assert instance.state.next_deadline() is None
    effects = instance.handle(PeerUp(again, Role.COORDINATOR), now=9.0)
    assert [type(effect) for effect in effects] == [Send]
    assert instance.state.next_deadline() == 9.5


def test_a_drain_is_reported_at_once_and_arrivals_once() -> None:
    """The coordinator hears of a drain before the next regular report, and of each arrival in one report only."""
    instance = Instance()
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    instance.start(spec("a", 6))
    instance.sent.clear()
    instance.handle(Drain(), now=0.1)
    instance.handle(Tick(), now=0.5)
    reports = [message for message in instance.sent if isinstance(message, LoadReport)]
    assert [(report.draining, report.accepted) for report in reports] == [(True, ("a",)), (True, ())]


def test_unreleased_end_is_repeated() -> None:
    """Finished is repeated every retry_s until the gateway releases the request."""
    instance = Instance()
    instance.start(spec("a", 3, max_tokens=1))
    instance.done(now=2.0)
    instance.sent.clear()
    assert instance.state.next_deadline() == 3.0
    instance.handle(Tick(), now=3.0)
    assert instance.sent == [Finished("a", 1, FinishReason.LENGTH, 1)]
    instance.handle(Release("a", 1))
    instance.handle(Tick(), now=4.0)
    assert instance.state.next_deadline() is None


@pytest.mark.parametrize("report_changes", [False, True])
def test_changes_are_reported_on_demand(*, report_changes: bool) -> None:
    """With ``report_changes`` a report follows each prompt that was computed and each end of a request, at once."""
    instance = Instance(replace(CONFIG, report_changes=report_changes))
    instance.handle(PeerUp(COORDINATOR, Role.COORDINATOR))
    instance.start(spec("r", 8, max_tokens=3))
    instance.sent.clear()
    reports = []
    for _ in range(3):
        instance.done()
        found = [message for message in instance.sent if isinstance(message, LoadReport)]
        reports.append([(report.pending_prompt_tokens, report.num_running) for report in found])
        instance.sent.clear()
    assert reports == ([[(0, 1)], [], [(0, 0)]] if report_changes else [[], [], []])
