"""The base of the actors: order, effects, deadlines, crashes."""

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from actorserve.actors.actor import Actor
from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.core.effects import Deliver, Effect, Send
from actorserve.core.messages import Close, Drain, Message, Peer, PeerDown, PeerUp, Role, Tick, Unplace
from actorserve.wire.journal import Entry
from tests.actors.cluster import Cluster, EntryList, GreetingCore, ScriptedCore, lone_node

C, G, W = COORDINATOR_NAME, "gateway-0", "worker-0"


class PerformingActor(ClusterActor):
    """An actor whose effects a test performs. It keeps the peers that went down."""

    def __init__(
        self,
        core: ScriptedCore | GreetingCore,
        clock: Callable[[], float],
        on_effect: Callable[[Effect], None] = lambda effect: None,
    ) -> None:
        self.recorder = EntryList()
        super().__init__(core, lone_node(C, clock, self.recorder))
        self.done: list[Effect | Peer] = []
        self._on_effect = on_effect

    def perform(self, effect: Effect) -> None:
        self.done.append(effect)
        self._on_effect(effect)

    def peer_went_down(self, peer: Peer) -> None:
        self.done.append(peer)


def test_local_messages_are_handled_in_order_after_their_cause() -> None:
    """A message that an effect causes is handled in a later step, after all earlier messages, and is recorded."""
    core = ScriptedCore({Drain: [Deliver("r", (1,))]})
    actor = PerformingActor(core, lambda: 5.0, lambda effect: actor.tell(Close("caused")))
    actor.tell(Drain())
    actor.tell(Close("later"))
    assert actor.step()
    assert not actor.step()
    assert core.seen == [Drain(), Close("later"), Close("caused")]
    assert actor.done == [Deliver("r", (1,))]
    assert actor.recorder.entries == [Entry(5.0, None, message) for message in core.seen]


def test_a_deadline_brings_one_tick() -> None:
    """The core gets Tick once its deadline has come, and not before."""
    now = 0.0
    core = ScriptedCore({}, deadline=1.0)
    actor = PerformingActor(core, lambda: now)
    actor.step()
    assert core.seen == []
    assert actor.next_deadline() == 1.0
    now = 1.0
    actor.step()
    actor.step()
    assert core.seen == [Tick()]


def test_sends_to_the_dead_are_counted() -> None:
    """A Send to a peer that is not up is dropped without an exception."""
    actor = PerformingActor(ScriptedCore({Drain: [Send(Peer(W, 1), Unplace("r", 1))]}), lambda: 0.0)
    actor.tell(Drain())
    actor.step()
    assert actor.counts["sends to a peer that is down"] == 1


def test_an_actor_hears_of_a_peer_that_went_down_once_its_core_knows() -> None:
    """``peer_went_down`` is called for every PeerDown, after its effects, and for no other message."""
    actor = PerformingActor(ScriptedCore({PeerDown: [Deliver("r", (1,))]}), lambda: 0.0)
    for message in (PeerUp(Peer(W, 1), Role.WORKER), PeerDown(Peer(W, 1)), Drain()):
        actor.tell(message)
    actor.step()
    assert actor.done == [Deliver("r", (1,)), Peer(W, 1)]


def test_an_effect_of_another_actor_is_a_bug() -> None:
    """An actor raises if its core returns an effect that the actor does not have."""
    actor = ClusterActor(ScriptedCore({Drain: [Deliver("r", (1,))]}), lone_node(C, lambda: 0.0))
    actor.tell(Drain())
    with pytest.raises(TypeError, match="coordinator was asked for Deliver"):
        actor.step()


def test_a_recorded_log_replays_to_the_same_end() -> None:
    """A new core that gets the recorded inputs of a disturbed cluster ends in the same state as the live core."""
    cluster = Cluster()
    for name in (C, G, W):
        cluster.start(name, 1)
    cluster.advance(1.0)
    cluster.kill(W)
    cluster.start(W, 2)
    cluster.advance(3.0)
    live, replayed = cluster.processes[G].core, GreetingCore()
    for entry in cluster.processes[G].recorder.entries:
        replayed.handle(entry.message, entry.now, sender=entry.sender)
    assert replayed == live
    assert live.downs == 1


async def test_a_bug_in_the_core_ends_the_actor_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An exception from the core propagates from run after one critical line, and the transport is closed."""
    actor = PerformingActor(GreetingCore(), time.monotonic)
    actor.tell(PeerDown(Peer("never met", 1)))
    with pytest.raises(KeyError):
        await asyncio.wait_for(actor.run(), 5)
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]
    assert "KeyError" in caplog.text


async def test_a_bug_in_performing_ends_the_actor_too() -> None:
    """An exception from perform propagates from run."""

    def fail(effect: Effect) -> None:
        raise OSError("disk full")

    core = ScriptedCore({Drain: [Deliver("r", (1,))]})
    actor = PerformingActor(core, time.monotonic, fail)
    actor.tell(Drain())
    with pytest.raises(OSError, match="disk full"):
        await asyncio.wait_for(actor.run(), 5)


async def test_stopping_ends_run_and_handles_nothing_more() -> None:
    """After stop, run returns and no message is handled; stopping again does nothing."""
    core = ScriptedCore({})
    actor = PerformingActor(core, time.monotonic)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(actor.run())
        await asyncio.sleep(0)
        actor.stop()
        actor.stop()
        actor.tell(Drain())
    assert core.seen == []


async def test_a_deadline_that_moves_wakes_the_actor_in_time() -> None:
    """An actor that waits for a late deadline ticks at an earlier one that a message sets, and then at the late one."""
    began = time.monotonic()
    ticks: list[float] = []
    both = asyncio.Event()

    class MovingCore(ScriptedCore):
        def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
            self.seen.append(message)
            if isinstance(message, Tick):
                ticks.append(now)
                self.deadline = began + 0.2 if len(ticks) == 1 else None
                if len(ticks) == 2:
                    both.set()
            else:
                self.deadline = began + 0.05
            return []

    core = MovingCore({}, deadline=began + 60.0)
    actor = PerformingActor(core, time.monotonic)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(actor.run())
        await asyncio.sleep(0)
        actor.tell(Drain())
        await both.wait()
        actor.stop()
    assert core.seen == [Drain(), Tick(), Tick()]
    assert ticks[0] >= began + 0.05
    assert ticks[1] >= began + 0.2


class _Countdown:
    """A core without a cluster: it sums its messages, and returns a word at every tick."""

    def __init__(self) -> None:
        self.left = 2

    def handle(self, message: int | Tick, now: float) -> list[str]:
        self.left -= 1
        return ["tick"] if isinstance(message, Tick) else [f"told {message}"]

    def next_deadline(self) -> float | None:
        return 0.0 if self.left else None


async def test_an_actor_needs_no_cluster() -> None:
    """The base alone runs a core of any messages and effects, with its mailbox and its deadlines."""
    performed: list[str] = []

    class Words(Actor[int, str]):
        def perform(self, effect: str) -> None:
            performed.append(effect)
            if effect == "tick":
                self.stop()

    actor = Words("words", _Countdown(), time.monotonic)
    actor.tell(7)
    await asyncio.wait_for(actor.run(), 5)
    assert performed == ["told 7", "tick"]
