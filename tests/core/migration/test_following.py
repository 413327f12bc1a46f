"""Handoffs whose last chunk is copied while an iteration computes it, and what the destination makes of that."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Effect, RunStep, Send
from actorserve.core.messages import (
    Attained,
    Copied,
    Declined,
    DeclineReason,
    HandOver,
    KVTicket,
    Offer,
    PeerDown,
    PeerUp,
    Release,
    RequestSpec,
    Role,
    Stage,
    Start,
    Started,
    Tick,
    Transfer,
    Withdrawn,
)
from actorserve.core.migration.config import LayerCopies, MigrationConfig, MigrationMode
from actorserve.core.migration.layer_copies import is_by_layer
from actorserve.core.timing.profile import Link
from actorserve.core.timing.step_times import StepTimes
from tests.core.harness import destination as harness
from tests.core.harness.driver import GATEWAY, PROFILE, Instance, migration_id, spec
from tests.core.harness.source import (
    ACCESS,
    INFO,
    SOURCE,
    D,
    assert_goes_on,
    assert_holds_nothing,
    hand_over,
    request_of,
    told,
)

FOLLOWS = replace(INFO, kv=replace(ACCESS, progress="memory"))
LAYERS = 10


def source(**changes: object) -> Instance:
    """An instance that knows the worker D, which can follow its iterations."""
    migration = replace(SOURCE.migration, num_layers=LAYERS)
    instance = Instance(replace(SOURCE, migration=migration, **changes))  # type: ignore[arg-type]
    instance.handle(PeerUp(D, Role.WORKER, FOLLOWS))
    return instance


def start(instance: Instance, num_prompt: int = 5, name: str = "r") -> list[Effect]:
    request = replace(spec(name, num_prompt, 100), prompt_token_ids=tuple(range(num_prompt)))
    return instance.handle(Start(1, request, Attained(), None, D), 0.0, GATEWAY)


def following(**changes: object) -> tuple[Instance, Stage]:
    """A source whose request r is being prefilled and copied, and the stage that says so."""
    instance = source(**changes)
    start(instance)
    [stage] = told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
    assert isinstance(stage, Stage)
    return instance, stage


def test_the_last_chunk_is_offered_while_it_is_computed() -> None:
    """The stage names the iteration, which makes the KV of all known tokens, and the token that follows is not known.
    The request is handed over when that iteration has ended and all is copied, whichever comes last.
    """
    for copied_first in (True, False):
        instance, stage = following()
        assert instance.plan is not None
        assert (stage.token_ids, stage.num_computed, stage.is_last) == ((), 5, True)
        assert (stage.ticket.step_id, stage.ticket.blocks) == (instance.plan.step_id, instance.plan.block_tables[0])
        assert stage.computing_s == pytest.approx(instance.state.times.prefill_s(5))
        if copied_first:
            assert not told(instance.handle(Copied(migration_id(), 1), 0.0, D), GATEWAY)
            effects = instance.done()
            assert Send(GATEWAY, hand_over(1)) in effects
        else:
            effects = instance.done()
            assert not told(effects, D, GATEWAY)
            assert instance.handle(Copied(migration_id(), 1), 0.0, D) == [Send(GATEWAY, hand_over(1))]
        assert not any(isinstance(effect, RunStep) for effect in instance.effects), "no decode runs here"


def test_only_the_last_chunk_is_followed() -> None:
    """Earlier chunks are offered when they are computed, and the last stage has all that no stage had before."""
    instance = source(max_batch_tokens=8)
    start(instance, 20)
    blocks = list(request_of(instance).blocks)
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    [stage] = told(instance.done(), D)
    assert isinstance(stage, Stage)
    assert (stage.num_computed, stage.ticket.step_id, stage.is_last) == (8, 0, False)
    instance.done()
    assert instance.plan is not None
    [stage] = told(instance.handle(Copied(migration_id(), 1), 0.0, D), D)
    assert isinstance(stage, Stage)
    assert (stage.num_computed, stage.ticket.step_id, stage.is_last) == (20, instance.plan.step_id, True)
    assert stage.ticket.blocks == tuple(blocks[2:])


def test_a_destination_that_cannot_follow_gets_the_last_chunk_afterwards() -> None:
    """A worker of an older protocol would copy at once what is not computed yet."""
    instance = Instance(SOURCE)
    instance.handle(PeerUp(D, Role.WORKER, INFO))
    start(instance)
    assert not told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
    [stage] = told(instance.done(), D)
    assert isinstance(stage, Stage)
    assert (stage.token_ids, stage.ticket.step_id, stage.ticket.by_layer) == ((9,), 0, False)


def test_a_serialized_handoff_follows_nothing() -> None:
    """Without live migration, all KV is copied when the prompt is computed."""
    migration = replace(SOURCE.migration, mode=MigrationMode.BLOCKING)
    instance = Instance(replace(SOURCE, migration=migration))
    instance.handle(PeerUp(D, Role.WORKER, FOLLOWS))
    assert not told(start(instance), D)
    [offer] = told(instance.done(), D)
    assert isinstance(offer, Offer)
    assert (offer.ticket.step_id, offer.num_computed) == (0, 5)


def test_blocks_that_the_request_gives_up_end_the_copy() -> None:
    """Two equal prompts are computed at once. When their iteration ends, the second gives up its blocks for the first
    one's, and the destination may read anything in them. So its copy counts for nothing, and it is handed off again.
    """
    instance = source()
    instance.start(replace(spec("busy", 5, 100), prompt_token_ids=(7, 7, 7, 7, 7)))
    instance.start(replace(spec("other", 8, 100)))
    start(instance, 8)
    instance.done()
    assert instance.plan is not None
    assert instance.plan.request_ids[-2:] == ("other", "r")
    [stage] = told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
    assert isinstance(stage, Stage)
    assert stage.ticket.step_id == instance.plan.step_id
    effects = instance.done()
    withdrawn, offer = told(effects, D)
    assert withdrawn == Withdrawn(migration_id())
    assert isinstance(offer, Offer)
    assert tuple(request_of(instance).blocks) != stage.ticket.blocks
    assert instance.handle(Copied(migration_id(), 1), 0.0, D) == [Send(D, Withdrawn(migration_id()))]
    assert not any(isinstance(message, HandOver) for message in told(instance.effects, GATEWAY))


def test_a_source_that_loses_the_destination_goes_on() -> None:
    """While the last chunk is copied the destination declines, or dies: the request decodes here."""
    for message, sender in ((Declined(migration_id(), DeclineReason.UNREACHABLE), D), (PeerDown(D), GATEWAY)):
        instance, _ = following()
        instance.handle(message, 0.0, sender)
        assert not instance.state.migration_source
        instance.done()
        assert_goes_on(instance)


def test_a_copy_that_lags_behind_its_iteration_is_given_up_in_time() -> None:
    """The deadline allows for the iteration, and for the copy."""
    instance, stage = following()
    deadline_s = instance.state.migration_source.next_deadline()
    assert deadline_s is not None
    assert deadline_s > SOURCE.migration.timeout_s + stage.computing_s
    instance.done()
    assert told(instance.handle(Tick(), deadline_s), D) == [Withdrawn(migration_id())]
    assert_goes_on(instance)


# --- one piece, or layer by layer ------------------------------------------------------------------------------------


def by_layer(num_bytes: int, left_s: float, latency_s: float = 0.001, **changes: object) -> bool:
    times = StepTimes(replace(PROFILE, transfer=Link(latency_s, 1e9)))
    return is_by_layer(replace(MigrationConfig(num_layers=LAYERS), **changes), times, num_bytes, left_s)  # type: ignore[arg-type]


def test_layers_are_copied_one_by_one_where_that_delays_less() -> None:
    """In one piece a copy delays nothing if it takes no longer than a layer. Else it shows, unless each layer's copy
    has so much latency that all together take longer than the iteration and the copy in one piece.
    """
    assert not by_layer(8 * 10**6, left_s=0.1)  # 9 ms, and a layer's time is 10 ms
    assert by_layer(10**7, left_s=0.1)
    assert by_layer(10**8, left_s=0.1)
    assert not by_layer(10**6, left_s=0.009)  # ten latencies of a millisecond
    assert by_layer(10**7, left_s=0.012)
    assert not by_layer(10**7, left_s=0.0)
    assert not by_layer(10**7, left_s=0.1, num_layers=1)


def test_an_operator_may_choose() -> None:
    """``layer_copies`` stands over what is expected."""
    assert by_layer(10**3, 0.0, layer_copies=LayerCopies.ALWAYS)
    assert not by_layer(10**7, 1.0, layer_copies=LayerCopies.NEVER)


def test_an_operator_may_have_nothing_followed() -> None:
    """Then the last chunk is offered when it is computed."""
    instance = Instance(replace(SOURCE, migration=replace(SOURCE.migration, layer_copies=LayerCopies.AFTER)))
    instance.handle(PeerUp(D, Role.WORKER, FOLLOWS))
    start(instance)
    assert not told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
    [stage] = told(instance.done(), D)
    assert isinstance(stage, Stage)
    assert stage.ticket.step_id == 0


def test_the_ticket_says_how() -> None:
    """Its secret covers the iteration and the way, so a reader cannot change them."""
    for way, is_expected in ((LayerCopies.ALWAYS, True), (LayerCopies.NEVER, False)):
        migration = replace(SOURCE.migration, num_layers=LAYERS, layer_copies=way)
        instance = Instance(replace(SOURCE, migration=migration))
        instance.handle(PeerUp(D, Role.WORKER, FOLLOWS))
        start(instance)
        [stage] = told(instance.handle(Copied(migration_id(), 0), 0.0, D), D)
        assert isinstance(stage, Stage)
        assert stage.ticket.by_layer is is_expected


# --- the destination -------------------------------------------------------------------------------------------------

PROMPT = spec("r", 8, 40)
NAMED = KVTicket(migration_id(), 1, False, (40, 41), "secret", step_id=7)


def reserved() -> Instance:
    """A destination that has reserved memory for r, whose prompt begins to be computed."""
    instance = harness.destination()
    offer = Offer(1, GATEWAY, PROMPT, 0, harness.ticket(0), False, 1.0)
    assert instance.handle(offer, 0.0, harness.S) == [Send(harness.S, Copied(migration_id(), 0))]
    return instance


def with_followed_copy() -> Instance:
    instance = reserved()
    fetch = harness.fetch_of(instance.handle(Stage((), 8, NAMED, True, 1.0), 0.0, harness.S))
    assert (fetch.ticket, fetch.is_urgent) == (NAMED, True)
    assert harness.copied(instance, fetch) == [Send(harness.S, Copied(migration_id(), 1))]
    return instance


def started(instance: Instance, request: RequestSpec) -> int:
    """r starts under the next epoch. Returns from which token on its KV is computed."""
    effects = instance.handle(Start(2, request, transfer=Transfer(harness.S, migration_id())))
    assert Send(GATEWAY, Started("r", 2)) in effects
    [step] = [effect for effect in effects if isinstance(effect, RunStep)]
    assert not instance.state.migration_destination
    return step.plan.starts[0]


def test_a_copy_that_followed_an_iteration_is_used_with_its_token() -> None:
    """The request comes with the token that the source did not know when it offered the KV."""
    assert started(with_followed_copy(), replace(PROMPT, output_token_ids=(9,))) == 8


def test_a_copy_that_followed_an_iteration_needs_exactly_its_tokens() -> None:
    """Without the token, or with two, or after another prompt, the KV is computed again."""
    other = replace(PROMPT, prompt_token_ids=(*range(7), 99))
    for request in (PROMPT, replace(PROMPT, output_token_ids=(9, 8)), replace(other, output_token_ids=(9,))):
        assert started(with_followed_copy(), request) == 0


def test_kv_of_all_tokens_needs_an_iteration() -> None:
    """A stage that names none has no KV of its newest token."""
    instance = reserved()
    stage = Stage((), 8, replace(NAMED, step_id=0), True)
    assert instance.handle(stage, 0.0, harness.S) == [Send(harness.S, Declined(migration_id(), DeclineReason.UNKNOWN))]
    harness.assert_holds_nothing(instance)


def test_a_long_iteration_is_waited_for() -> None:
    """What is reserved and copied stays as long as the source is expected to compute, and not for ever."""
    for instance in (reserved(), with_followed_copy()):
        instance.handle(Tick(), 2 * harness.TIMEOUT_S + 3.5)
        assert instance.state.migration_destination
        instance.handle(Tick(), 2 * harness.TIMEOUT_S + 4.5)
        harness.assert_holds_nothing(instance)


def test_a_source_that_dies_while_it_computes_ends_the_copy() -> None:
    """The copy is cancelled, and its blocks are free once it has ended."""
    instance = reserved()
    fetch = harness.fetch_of(instance.handle(Stage((), 8, NAMED, True, 1.0), 0.0, harness.S))
    instance.handle(PeerDown(harness.S))
    assert not instance.state.migration_destination
    assert harness.num_used(instance) > 0
    harness.copied(instance, fetch)
    harness.assert_holds_nothing(instance)


def test_a_finished_handoff_leaves_nothing() -> None:
    """The source frees all when the gateway says that the request has moved."""
    instance, _ = following()
    instance.done()
    instance.handle(Copied(migration_id(), 1), 0.0, D)
    instance.handle(Release("r", 1))
    assert_holds_nothing(instance)
