"""The worker actor: the effects that it performs for its instance, and its end."""

import asyncio
import os
from collections.abc import Callable

import pytest

from actorserve.actors.worker import EngineEffect, WorkerActor
from actorserve.core.effects import Deliver, Drained, DropFromEngine, Effect
from actorserve.core.messages import CopyFailed, Drain, Message, Peer, PeerDown
from actorserve.processes.status import Phase, Reporter, Status, decode_status
from tests.actors.cluster import ScriptedCore, lone_node

W = "worker-0"
DEADLINE_S = 10.0


class FakeEngine:
    """An engine shell that records its calls."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.done: list[EngineEffect | Peer | float] = []
        self.tell: Callable[[Message], None] | None = None
        self._failure = failure

    async def run(self, tell: Callable[[Message], None]) -> None:
        self.tell = tell
        if self._failure is not None:
            raise self._failure
        await asyncio.Event().wait()

    def perform(self, effect: EngineEffect) -> None:
        self.done.append(effect)

    def forget(self, peer: Peer) -> None:
        self.done.append(peer)

    def stop(self, patience_s: float) -> None:
        self.done.append(patience_s)


class Worker:
    """A worker actor with a scripted core, and the supervisor's end of its reports."""

    def __init__(self, effects: dict[type[Message], list[Effect]], engine: FakeEngine) -> None:
        self._reading, self._writing = os.pipe()
        self.core = ScriptedCore(effects)
        node = lone_node(W, asyncio.get_running_loop().time)
        self.actor = WorkerActor(self.core, node, engine, Reporter(self._writing))

    async def run(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.actor.run()

    def reports(self) -> list[Status | None]:
        """The worker's reports. This ends reporting."""
        os.close(self._writing)
        with os.fdopen(self._reading, "rb") as pipe:
            return [decode_status(line) for line in pipe]


async def test_engine_effects_go_to_the_engine_and_lost_peers_are_forgotten() -> None:
    """The engine gets the core's engine effects and all peers that went down. Its results reach the core."""
    engine = FakeEngine()
    peer = Peer("worker-1", 1)
    worker = Worker({PeerDown: [DropFromEngine("r")], CopyFailed: [Drained()]}, engine)
    worker.actor.tell(PeerDown(peer))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(DEADLINE_S):
        while engine.tell is None:  # noqa: ASYNC110 -- the next turns of the loop start it
            await asyncio.sleep(0)
    engine.tell(CopyFailed(7))
    await running
    assert engine.done[:2] == [DropFromEngine("r"), peer]
    assert worker.core.seen == [PeerDown(peer), CopyFailed(7)]
    worker.reports()


async def test_a_worker_that_the_coordinator_drained_says_that_it_stopped() -> None:
    """When the core has drained, the worker ends, waits for the engine, and reports that it stopped on purpose."""
    engine = FakeEngine()
    worker = Worker({Drain: [Drained()]}, engine)
    worker.actor.tell(Drain())
    await worker.run()
    assert worker.reports() == [Status(Phase.STOPPED, "it is not needed now")]
    assert engine.done == [5.0]


async def test_a_worker_that_an_operator_restarts_says_so() -> None:
    """It reports that it is to be started again, and its process knows it."""
    worker = Worker({Drain: [Drained(comes_back=True)]}, FakeEngine())
    worker.actor.tell(Drain(comes_back=True))
    await worker.run()
    assert worker.reports() == [Status(Phase.RESTARTS, "an operator restarts it")]
    assert worker.actor.comes_back


async def test_a_worker_that_is_terminated_drains_silently() -> None:
    """The core gets one Drain for a termination, and the worker then ends without a report."""
    worker = Worker({Drain: [Drained()]}, FakeEngine())
    worker.actor.drain(DEADLINE_S)
    worker.actor.drain(DEADLINE_S)
    await worker.run()
    assert worker.core.seen == [Drain()]
    assert worker.reports() == []


async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    """A worker whose core never drains ends after the drain's time."""
    worker = Worker({}, FakeEngine())
    worker.actor.drain(0.01)
    await worker.run()
    assert worker.core.seen == [Drain()]
    assert worker.reports() == []


async def test_an_engine_that_fails_ends_the_worker() -> None:
    """The engine's exception propagates from run."""
    worker = Worker({}, FakeEngine(KeyError("bug")))
    with pytest.raises(ExceptionGroup) as caught:
        await worker.run()
    assert caught.group_contains(KeyError)
    worker.reports()


async def test_a_worker_delivers_no_tokens_to_clients() -> None:
    """An effect of another actor is a bug, which ends the worker."""
    worker = Worker({Drain: [Deliver("r", (1,))]}, FakeEngine())
    worker.actor.tell(Drain())
    with pytest.raises(ExceptionGroup) as caught:
        await worker.run()
    assert caught.group_contains(TypeError, match="worker-0 was asked for Deliver")
    worker.reports()
