"""Handoffs: a prompt instance copies a prompt's KV to its token instance while it computes the prompt."""

from dataclasses import replace

import pytest

from actorserve.core.effects import Effect, Meet, RunStep, Send
from actorserve.core.kv.layer_groups import LayerGroups
from actorserve.core.messages import (
    Attained,
    Copied,
    Declined,
    DeclineReason,
    InstanceRole,
    Message,
    Offer,
    Peer,
    PeerDown,
    PeerUp,
    Release,
    Role,
    Stage,
    Start,
    Withdrawn,
)
from actorserve.core.migration.config import MigrationMode
from tests.core.harness.driver import GATEWAY, Instance, migration_id, spec
from tests.core.harness.source import (
    INFO,
    D,
    E,
    assert_goes_on,
    assert_holds_nothing,
    hand_over,
    order,
    request_of,
    source,
    ticket,
    told,
)
from tests.core.world.world import World

F = Peer("worker-3", 1)


def plain(messages: list[Message]) -> list[Message]:
    """The same messages without the expected times."""
    return [
        replace(message, computing_s=0.0) if isinstance(message, Offer | Stage) else message for message in messages
    ]


def start(instance: Instance, num_prompt: int, to: Peer = D, max_tokens: int = 100) -> list[Effect]:
    return instance.handle(Start(1, spec("r", num_prompt, max_tokens), Attained(), None, to), 0.0, GATEWAY)


def test_chunks_are_copied_while_the_next_ones_are_computed() -> None:
    """The destination reserves memory when the prompt begins, and each stage copies the chunks that have ended. The
    request is paused when its last chunk is planned, so the second token comes from the destination.
    """
    instance = source(max_batch_tokens=8)
    effects = start(instance, 20)
    request = request_of(instance)
    blocks = list(request.blocks)
    assert plain(told(effects, D)) == [Offer(1, GATEWAY, request.spec_now(), 0, ticket(migration_id(), 0), False)]
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    effects = instance.done()
    assert plain(told(effects, D)) == [Stage((), 8, ticket(migration_id(), 1, *blocks[:2]), False)]
    instance.done()
    effects = instance.handle(Copied(migration_id(), 1), 0.0, D)
    assert request in instance.state.migration_source.paused, "the last chunk is planned"
    assert plain(told(effects, D)) == [Stage((), 16, ticket(migration_id(), 2, *blocks[2:4]), False)]
    instance.handle(Copied(migration_id(), 2), 0.0, D)
    effects = instance.done()
    assert not any(isinstance(effect, RunStep) for effect in effects), "no decode runs here"
    assert request.num_output == 1
    assert told(effects, D) == [Stage((9,), 20, ticket(migration_id(), 3, blocks[4]), True)]
    assert instance.handle(Copied(migration_id(), 3), 0.0, D) == [Send(GATEWAY, hand_over(1))]
    instance.handle(Release("r", 1))
    assert_holds_nothing(instance)


def test_a_prompt_of_one_chunk_is_copied_in_one_piece() -> None:
    """A destination without room says so before the prompt is computed."""
    instance = source()
    effects = start(instance, 5)
    request = request_of(instance)
    assert plain(told(effects, D)) == [Offer(1, GATEWAY, request.spec_now(), 0, ticket(migration_id(), 0), False)]
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    assert request in instance.state.migration_source.paused
    assert told(instance.done(), D) == [Stage((9,), 5, ticket(migration_id(), 1, *request.blocks), True)]


def test_a_destination_without_room_leaves_the_request_here() -> None:
    """The prompt instance goes on decoding, and says so in its reports."""
    instance = source()
    start(instance, 5)
    instance.handle(Declined(migration_id(), DeclineReason.NO_BLOCKS), 0.0, D)
    instance.done()
    assert_goes_on(instance)
    report = instance.state.load_report()
    assert (report.num_decoding, report.kv_decoding_bytes) == (1, 300)


def test_the_destinations_death_leaves_the_request_here() -> None:
    """What is copied is lost, and what lies here is not."""
    instance = source(max_batch_tokens=8)
    start(instance, 20)
    instance.done()
    instance.handle(PeerDown(D))
    assert not instance.state.migration_source
    instance.done()
    instance.done()
    assert_goes_on(instance)


def test_an_unknown_destination_is_met_first() -> None:
    """A worker that this one has not met yet gets the request when they have met, even if that is after the prompt."""
    instance = source()
    effects = instance.handle(Start(1, spec("r", 5, 100), Attained(), None, F), 0.0, GATEWAY)
    assert Meet(F) in effects
    while request_of(instance).num_output < 2:
        instance.done()
    instance.handle(PeerUp(F, Role.WORKER, INFO))
    offers = told(instance.effects, F)
    while not offers:
        offers = told(instance.done(), F)
    assert isinstance(offers[0], Offer)


def test_a_request_that_ends_with_its_first_token_is_not_handed_off() -> None:
    """The destination gives back what it has reserved."""
    instance = source()
    start(instance, 5, max_tokens=1)
    instance.handle(Copied(migration_id(), 0), 0.0, D)
    effects = instance.done()
    assert told(effects, D) == [Withdrawn(migration_id())]
    assert not instance.state.requests


def test_a_serialized_handoff_copies_all_at_once() -> None:
    """Without live migration, nothing is copied before the prompt is computed."""
    instance = source(mode=MigrationMode.BLOCKING, max_batch_tokens=8)
    start(instance, 20)
    assert told(instance.done(), D) == []
    assert told(instance.done(), D) == []
    [offer] = told(instance.done(), D)
    assert isinstance(offer, Offer)
    assert (offer.num_computed, offer.is_last) == (20, True)
    assert len(offer.ticket.blocks) == 5


def test_handoffs_do_not_wait_for_each_other() -> None:
    """A limit on migrations at once is none on handoffs, because all prompts of an iteration are due together."""
    instance = source(max_outgoing=1)
    for number in range(3):
        request = replace(spec("r", 5, 100), request_id=f"r{number}")
        instance.handle(Start(1, request, Attained(), None, E), 0.0, GATEWAY)
    instance.done()
    assert len(instance.state.migration_source) == 3


@pytest.mark.parametrize("dies", ["worker-0", "worker-1", ""])
def test_an_answer_is_the_same_whoever_dies(dies: str) -> None:
    """A request of a prompt and a token instance gets every token once, and the same ones."""
    world = World(num_workers=3, num_blocks=48)
    for number, role in enumerate((InstanceRole.PROMPT, InstanceRole.TOKEN, InstanceRole.TOKEN)):
        world.set_role(f"worker-{number}", role)
    world.progress()
    for number in range(6):
        world.open(f"r{number}", tuple(range(number, number + 30)), 20)
    for _ in range(7):
        world.progress()
    if dies:
        world.kill(dies)
    world.settle()
    assert all(client.tokens == client.expected for client in world.clients.values())
    world.check_at_rest()


def test_a_prompt_that_waits_moves_though_it_has_a_token_instance() -> None:
    """An instance that is to be empty gives away the prompts that it has not begun, but not one that it computes."""
    instance = source(max_batch_requests=1, max_batch_tokens=8)
    instance.handle(Start(1, replace(spec("r", 20, 100), request_id="begun"), Attained(), None, E), 0.0, GATEWAY)
    instance.handle(Start(1, spec("r", 20, 100), Attained(), None, E), 0.0, GATEWAY)
    assert told(order(instance, D), GATEWAY) == [hand_over(0, number=0)]
    instance.handle(Release("r", 1))
    assert list(instance.state.requests) == ["begun"]
    assert order(instance, D) == []


def test_a_prompt_that_is_preempted_is_handed_off_again() -> None:
    """A request that decodes takes the blocks of a prompt that is being copied, whose layers with a window lack others.
    The destination copied too late, and the handoff begins again when the prompt does.
    """
    windows = LayerGroups(num_full=1, num_windowed=1, window=4)
    instance = source(num_blocks=28, max_batch_tokens=4, prefix_cache=False, layer_groups=windows)
    instance.start(spec("other", 4, 190))
    instance.done()
    start(instance, 60)
    instance.done()
    while request_of(instance).is_resident:
        instance.done()
    assert len(instance.state.migration_source) == 1, "the source has not noticed yet"
    assert told(instance.handle(Copied(migration_id(), 0), 0.0, D), D) == [Withdrawn(migration_id())]
    instance.handle(Release("other", 1))
    while not told(instance.effects, D) and not request_of(instance).num_output:
        instance.done()
    [offer] = told(instance.effects, D)
    assert isinstance(offer, Offer)
    assert offer.transfer == migration_id(2)
