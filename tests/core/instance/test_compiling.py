"""Requests whose grammars are being compiled: they wait, and no other request waits for them."""

from dataclasses import replace

from actorserve.core.effects import AddToEngine, DropFromEngine, Send
from actorserve.core.messages import (
    Drain,
    GrammarReady,
    HandOver,
    MigrateTo,
    Peer,
    PeerUp,
    Release,
    Role,
    Start,
    Started,
    Transfer,
)
from tests.core.harness.destination import MOVED, S, with_copy
from tests.core.harness.driver import GATEWAY, Instance, migration_id, spec

OTHER = Peer("worker-1", 1)


def planned(instance: Instance) -> tuple[str, ...]:
    return instance.plan.request_ids if instance.plan is not None else ()


def test_a_request_waits_for_its_grammar_alone() -> None:
    """A request is acknowledged at once, but no step names it before its grammar is ready; other requests go on."""
    instance = Instance()
    request = spec("a", 3, grammar="g")
    assert instance.start(request) == [Send(GATEWAY, Started("a", 1)), AddToEngine(request)]
    instance.start(spec("b", 3, max_tokens=9))
    for _ in range(3):
        assert planned(instance) == ("b",)
        instance.done()
    instance.handle(GrammarReady("a"))
    assert planned(instance) == ("b",)  # which was in flight
    instance.done()
    assert set(planned(instance)) == {"a", "b"}


def test_a_ready_grammar_starts_an_idle_instance() -> None:
    """If nothing else runs, a request's first step begins when its grammar is ready."""
    instance = Instance()
    instance.start(spec("a", 3, grammar="g"))
    assert instance.plan is None
    instance.handle(GrammarReady("a"))
    assert planned(instance) == ("a",)


def test_a_request_may_leave_before_its_grammar_is_ready() -> None:
    """A request that is released while its grammar is compiled is forgotten, and the late answer is ignored."""
    instance = Instance()
    instance.start(spec("a", 3, grammar="g"))
    assert instance.handle(Release("a", 1)) == [DropFromEngine("a")]
    assert not instance.state.compiling
    instance.handle(GrammarReady("a"))
    assert instance.state.num_stale_messages == 1
    assert instance.plan is None


def test_a_new_epoch_waits_again() -> None:
    """A request that starts again under a newer epoch waits for its grammar once more."""
    instance = Instance()
    for epoch in (1, 2):
        instance.start(spec("a", 3, grammar="g"), epoch)
        assert instance.plan is None
        if epoch == 2:
            instance.handle(GrammarReady("a"))
    assert planned(instance) == ("a",)


def test_a_request_that_moved_here_keeps_its_kv_while_its_grammar_is_compiled() -> None:
    """At a migration's destination the copied KV waits with the request, and other requests run meanwhile."""
    moved = replace(MOVED, sampling=replace(MOVED.sampling, grammar="g"))
    instance = with_copy()
    effects = instance.handle(Start(2, moved, transfer=Transfer(S, migration_id())))
    assert effects == [Send(GATEWAY, Started("r", 2)), AddToEngine(moved)]
    instance.start(spec("b", 3, max_tokens=9))
    assert planned(instance) == ("b",)
    instance.done()
    instance.handle(GrammarReady("r"))
    instance.done()
    plan = instance.plan
    assert plan is not None
    assert plan.starts[plan.request_ids.index("r")] == 9


def test_a_request_may_move_away_before_its_grammar_is_ready() -> None:
    """A request that waits for its grammar is handed to another instance, as any waiting request."""
    instance = Instance()
    instance.handle(PeerUp(OTHER, Role.WORKER))
    instance.start(spec("a", 3, grammar="g"))
    instance.handle(Drain())
    instance.handle(MigrateTo(OTHER, 10_000, 5.0))
    (asked,) = [message for message in instance.sent if isinstance(message, HandOver)]
    assert (asked.request_id, asked.to, asked.transfer) == ("a", OTHER, None)
    instance.handle(GrammarReady("a"))
    assert instance.plan is None  # the gateway has not answered yet
    instance.handle(Release("a", 1))
    assert not instance.state.compiling
    assert not instance.state.requests
