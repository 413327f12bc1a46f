"""Requests on a prompt instance that are not handed off: what moves, and what counts as a decode."""

from dataclasses import replace

from actorserve.core.messages import Attained, LoadReport, MigrateTo, Offer, Peer, PeerUp, Role, Start
from tests.core.harness.destination import adopted, destination, with_copy
from tests.core.harness.driver import GATEWAY, Instance, spec
from tests.core.harness.source import COORDINATOR, INFO, D, order, request_of, source, told

DEAD = Peer("worker-9", 1)


def start(instance: Instance, to: Peer | None, num_output: int = 0) -> None:
    request = replace(spec("r", 5, 100), output_token_ids=(7,) * num_output)
    instance.handle(Start(1, request, Attained(), None, to), 0.0, GATEWAY)


def report(instance: Instance) -> LoadReport:
    return instance.state.load_report()


def test_a_request_whose_token_instance_was_dead_before_may_move() -> None:
    """This instance never learns that the token instance is gone. It moves the request where the coordinator says."""
    instance = source()
    start(instance, DEAD)
    instance.done()
    assert request_of(instance).num_output == 1
    assert any(isinstance(message, Offer) for message in told(order(instance), D))


def test_a_request_waits_for_a_token_instance_that_is_up() -> None:
    """It is handed off, so no other order moves it."""
    instance = source()
    instance.handle(PeerUp(DEAD, Role.WORKER, INFO))
    start(instance, DEAD)
    assert told(order(instance), D) == []


def test_a_resumed_prompt_is_no_decode() -> None:
    """Its client has tokens of it, but this instance has made none yet, so it counts and moves as a prompt."""
    instance = source(max_batch_tokens=4)
    start(instance, None, num_output=3)
    assert report(instance).num_decoding == 0
    instance.handle(MigrateTo(D, 10_000, 5.0, decoding_only=True), 0.0, COORDINATOR)
    while request_of(instance).num_output == 3:
        assert report(instance).num_decoding == 0
        instance.done()
    assert report(instance).num_decoding == 1


def test_a_request_that_came_with_its_kv_is_a_decode_at_once() -> None:
    """Otherwise a helper that gets requests handed over all the time would seem to compute prompts for ever."""
    instance = with_copy()
    assert adopted(instance)
    assert report(instance).num_decoding == 1


def test_a_request_that_came_without_its_kv_is_a_prompt_first() -> None:
    instance = destination()
    assert not adopted(instance)
    assert report(instance).num_decoding == 0
