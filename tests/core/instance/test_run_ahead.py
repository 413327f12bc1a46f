"""An iteration is planned while the one before it runs, and everything is as if it had been planned afterwards."""

from dataclasses import replace

from actorserve.core.effects import DropFromEngine, Effect, RunStep, SwapOut
from actorserve.core.messages import NOT_YET, Finished, FinishReason, Release, StepPlan, Tokens
from tests.core.harness.driver import CONFIG, Instance, spec

AHEAD = replace(CONFIG, run_ahead=True)


def plans(effects: list[Effect]) -> list[StepPlan]:
    return [effect.plan for effect in effects if isinstance(effect, RunStep)]


def tokens_of(instance: Instance, name: str) -> list[tuple[int, int]]:
    """(position, token) of each token that was sent for a request."""
    return [
        (position, token)
        for message in instance.sent
        if isinstance(message, Tokens)
        for request_id, position, token in zip(message.request_ids, message.positions, message.token_ids, strict=True)
        if request_id == name
    ]


def decoding(instance: Instance, *names: str, max_tokens: int = 8, **sampling: object) -> None:
    """Requests of three prompt tokens decode: an iteration with all of them is in flight."""
    for name in names:
        instance.start(spec(name, 3, max_tokens=max_tokens, **sampling))
    while instance.plan is None or len(instance.plan.request_ids) < len(names) or len(instance.plan.token_ids[0]) > 1:
        instance.done()


def test_the_next_iteration_feeds_tokens_that_are_not_known_yet() -> None:
    """It is planned before the iteration in flight ends, as if that one had ended, and each token is sent once."""
    instance = Instance(AHEAD)
    decoding(instance, "r")
    assert instance.plan is not None
    (plan,) = plans(instance.plan_ahead())
    assert plan.starts == (instance.plan.starts[0] + 1,)
    assert plan.token_ids == ((NOT_YET,),)
    assert instance.plan_ahead() == []  # two iterations are in flight
    num_sent = len(tokens_of(instance, "r"))
    instance.done(token=5)
    instance.done(token=6)
    assert tokens_of(instance, "r")[num_sent:] == [(num_sent, 5), (num_sent + 1, 6)]


def test_it_is_planned_shortly_before_the_iteration_in_flight_ends() -> None:
    """A request that comes before that is in the next iteration, as it would be without running ahead."""
    instance = Instance(AHEAD)
    decoding(instance, "r")
    due_s = instance.state.next_deadline()
    assert due_s is not None
    assert 0.0 < due_s < 0.01  # the iteration takes 10 ms
    assert plans(instance.start(spec("late", 3))) == []
    (plan,) = plans(instance.plan_ahead())
    assert set(plan.request_ids) == {"r", "late"}


def test_without_it_iterations_are_planned_one_after_the_other() -> None:
    """With ``run_ahead`` off no deadline comes before the iteration's end."""
    instance = Instance(CONFIG)
    decoding(instance, "r")
    assert instance.state.next_deadline() is None
    assert plans(instance.handle(Release("other", 1), now=100.0)) == []


def test_a_request_that_ends_by_its_length_is_not_planned_again() -> None:
    """Its last token is in flight, so the next iteration has only the other request."""
    instance = Instance(AHEAD)
    decoding(instance, "long")
    instance.start(spec("short", 3, max_tokens=1))
    instance.done()
    assert instance.plan is not None
    assert set(instance.plan.request_ids) == {"long", "short"}
    (plan,) = plans(instance.plan_ahead())
    assert plan.request_ids == ("long",)
    instance.done()
    assert Finished("short", 1, FinishReason.LENGTH, 1) in instance.sent


def test_a_token_after_the_last_one_is_dropped() -> None:
    """A request ends by a stop token while it is in the next iteration: that one's token is sent to nobody, and the
    blocks are free when that iteration has ended.
    """
    instance = Instance(AHEAD)
    decoding(instance, "r", stop_token_ids=(7,))
    instance.plan_ahead()
    num_sent = len(tokens_of(instance, "r"))
    effects = instance.done(token=7)
    assert tokens_of(instance, "r")[num_sent:] == [(num_sent, 7)]
    assert DropFromEngine("r") in effects
    memory = instance.state.memory
    assert memory.device.num_free_blocks < memory.device.num_blocks
    instance.done(token=8)
    assert len(tokens_of(instance, "r")) == num_sent + 1
    assert memory.device.num_free_blocks == memory.device.num_blocks


def test_a_request_that_left_is_replaced_while_it_runs() -> None:
    """A newer epoch of a request that is in both iterations gets none of their tokens."""
    instance = Instance(AHEAD)
    decoding(instance, "r")
    instance.plan_ahead()
    instance.start(spec("r", 3, max_tokens=8), epoch=2)
    instance.sent.clear()
    instance.done(token=5)
    instance.done(token=6)
    assert tokens_of(instance, "r") == []
    instance.done(token=9)
    assert tokens_of(instance, "r") == [(0, 9)]


def swapping() -> Instance:
    """An instance that swaps a running request out as soon as one of its requests needs another block."""
    config = replace(AHEAD, num_blocks=4, num_host_blocks=8, max_context_tokens=12, prefix_cache=False)
    return Instance(config)


def test_a_running_request_is_swapped_out_when_its_iteration_has_ended() -> None:
    """It gives way while the iteration in flight still writes its KV, so the copy begins at that iteration's end."""
    instance = swapping()
    decoding(instance, "first", "second", max_tokens=9)
    assert instance.plan is not None
    while not instance.state.memory.is_copying:
        assert not instance.copies
        instance.plan_ahead()
        if not instance.state.memory.is_copying:
            instance.done()
    assert instance.copies == []
    effects = instance.done()
    assert any(isinstance(effect, SwapOut) for effect in effects)


def test_every_effect_of_a_copy_waits_for_the_iterations_that_use_its_blocks() -> None:
    """While two iterations are in flight, no copy begins that touches a block that one of them names."""
    instance = swapping()
    decoding(instance, "first", "second", max_tokens=9)
    for _ in range(60):
        instance.plan_ahead()
        named = {
            block
            for plan in (instance.plan, instance.next_plan)
            if plan is not None
            for table in plan.block_tables
            for block in table
        }
        for copy in instance.copies:
            assert not named & set(copy.device_blocks)
        if instance.plan is not None:
            instance.done()
        elif instance.copies:
            instance.copied()
    assert not instance.state.requests
