"""``InstanceState.validate`` notices each broken invariant."""

from collections.abc import Callable

import pytest

from actorserve.core.messages import CheckpointTo, MigrateTo, Peer
from actorserve.core.request import Request
from tests.core.harness.driver import GATEWAY, Instance, spec
from tests.core.harness.source import at, decoding, request_of, source

D = Peer("worker-1", 1)


def running() -> Instance:
    """An instance without a prefix cache that decodes r and s, and moves r to another worker."""
    instance = source(prefix_cache=False, num_host_blocks=8, max_outgoing=1)
    decoding(instance)
    decoding(instance, "s", num_prompt=12)
    instance.handle(MigrateTo(D, 10_000, 5.0))
    return instance


def lose_a_block(instance: Instance) -> None:
    request_of(instance).blocks.pop()


def free_a_block_in_use(instance: Instance) -> None:
    instance.state.memory.device.free(request_of(instance).blocks[:1])


def own_anothers_block(instance: Instance) -> None:
    request_of(instance).blocks[0] = request_of(instance, "s").blocks[0]


def take_a_host_block(instance: Instance) -> None:
    instance.state.memory.host.allocate(1)


def miscount_what_is_freeing(instance: Instance) -> None:
    instance.state.memory.num_freeing_blocks += 1


def copy_without_a_copy(instance: Instance) -> None:
    request_of(instance).copy_id = 99


def forget_it_in_the_policy(instance: Instance) -> None:
    instance.state.policy.remove(request_of(instance))


def order_a_stranger(instance: Instance) -> None:
    instance.state.policy.remove(request_of(instance))
    instance.state.policy.add(Request(spec("t", 3), 1, GATEWAY), 0.0)


def lose_a_moving_request(instance: Instance) -> None:
    request = instance.state.requests.pop("r")
    instance.state.policy.remove(request)


def pause_one_that_stays(instance: Instance) -> None:
    request = next(each for each in instance.state.requests.values() if each.request_id == "s")
    instance.state.migration_source.paused.add(request)


def end_without_leaving(instance: Instance) -> None:
    instance.state.outbox["s"] = request_of(instance, "s")


def expect_a_token_of_no_step(instance: Instance) -> None:
    request_of(instance, "s").num_coming += 1


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lose_a_block, "has 0 owners, but 1 are counted"),
        (free_a_block_in_use, "has 1 owners, but 0 are counted"),
        (own_anothers_block, "owners, but 1 are counted"),
        (take_a_host_block, "has 0 owners, but 1 are counted"),
        (miscount_what_is_freeing, "1 blocks freeing, not 0"),
        (copy_without_a_copy, "a copy is unknown"),
        (forget_it_in_the_policy, "the policy orders 1 requests of 2"),
        (order_a_stranger, "the policy orders other requests"),
        (lose_a_moving_request, "r moves, but is not here"),
        (pause_one_that_stays, "a request is paused, but does not move"),
        (end_without_leaving, "a request is here, and has ended"),
        (expect_a_token_of_no_step, "2 tokens are not coming"),
    ],
)
def test_damage_is_noticed(damage: Callable[[Instance], None], text: str) -> None:
    """A healthy instance passes, and one that a bug has damaged raises an error that names the damage."""
    instance = running()
    instance.state.validate()
    damage(instance)
    with pytest.raises(AssertionError, match=text):
        instance.state.validate()


def test_a_paused_request_that_runs_is_noticed() -> None:
    """A request that is handed over is in no batch."""
    instance = at("handing over")
    instance.state.migration_source.paused.clear()
    with pytest.raises(AssertionError, match="r is paused too early or too late"):
        instance.state.validate()


def test_a_checkpoint_of_a_request_that_is_gone_is_noticed() -> None:
    """The source tracks only its own requests."""
    instance = source(checkpoint_tokens=4)
    decoding(instance, num_prompt=9)
    instance.handle(CheckpointTo(D), 1.0)
    request = instance.state.requests.pop("r")
    instance.state.policy.remove(request)
    with pytest.raises(AssertionError, match="checkpoints of r, which is gone"):
        instance.state.validate()


def test_shared_blocks_of_different_content_are_noticed() -> None:
    """Requests share a block only if all tokens up to its end are equal."""
    instance = source()
    decoding(instance, num_prompt=9)
    decoding(instance, "s", num_prompt=9)
    assert request_of(instance).blocks[0] == request_of(instance, "s").blocks[0]
    instance.state.validate()
    request_of(instance, "s").token_ids[0] += 1
    with pytest.raises(AssertionError, match="has owners that differ"):
        instance.state.validate()
