"""The node: incarnations, open files, and whole clusters over ZeroMQ."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.membership import COORDINATOR_NAME, Membership, WatchTimes
from actorserve.actors.node import Node, fresh_incarnation, open_node
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import Effect
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Message, Peer, PeerUp, Tick
from actorserve.settings import ClusterSettings
from actorserve.wire.envelope import ANY_INCARNATION
from actorserve.wire.zmq_transport import ZmqTransport
from tests.actors.cluster import EntryList, GreetingCore, role_of

C, G, W = COORDINATOR_NAME, "gateway-0", "worker-0"


def test_fresh_incarnations_grow() -> None:
    """An incarnation drawn a moment later is larger."""
    first = fresh_incarnation()
    deadline = time.monotonic() + 5
    while fresh_incarnation() <= first:
        assert time.monotonic() < deadline


def test_a_process_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    """The soft limit of open files is raised to the hard limit, which bounds the number of sockets."""
    code = (
        "import resource\n"
        "from actorserve.actors.node import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "assert raise_file_limit() == 300\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class _Live:
    """Actors over ZeroMQ, as tasks of one group."""

    def __init__(self, folder: Path, group: asyncio.TaskGroup) -> None:
        self._folder = folder
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.cores: dict[str, GreetingCore] = {}
        self.actors: dict[str, ClusterActor] = {}

    def start(self, name: str) -> None:
        address = f"ipc://{self._folder / name}"
        transport = ZmqTransport(Peer(name, fresh_incarnation()), address)
        membership = Membership(
            transport,
            Hello(PROTOCOL_VERSION, role_of(name), address),
            {C: f"ipc://{self._folder / C}"},
            WatchTimes(0.05, 1.0),
        )
        core = self.cores[name] = GreetingCore()
        node = Node(transport, membership, time.monotonic)
        actor = self.actors[name] = ClusterActor(core, node)
        self._tasks[name] = self._group.create_task(actor.run())

    async def kill(self, name: str) -> None:
        task = self._tasks.pop(name)
        del self.actors[name], self.cores[name]
        task.cancel()
        await asyncio.wait([task])

    def is_steady(self) -> bool:
        members = {actor.me for actor in self.actors.values()}
        return all(core.up == core.greeted_by == members - {self.actors[name].me} for name, core in self.cores.items())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 -- it waits for the states of several cores
                await asyncio.sleep(0.005)


async def _a_life_over_zeromq() -> None:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        os.chmod(folder, 0o700)
        async with asyncio.TaskGroup() as group:
            live = _Live(Path(folder), group)
            for name in (W, G, C):
                live.start(name)
            await live.until(live.is_steady)
            for victim in (C, W, G):
                await live.kill(victim)
                live.start(victim)
                await live.until(live.is_steady)
            await live.kill(W)
            await live.until(lambda: all(len(core.up) == 1 for core in live.cores.values()))
            ups = [m for _, _, m in live.cores[G].log if isinstance(m, PeerUp)]
            assert ups
            for actor in live.actors.values():
                actor.stop()


def test_a_cluster_over_zeromq_on_uvloop_survives_restarts() -> None:
    """Over real sockets, coordinator, worker and gateway die and return in turn, and always meet all others again."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_a_life_over_zeromq())


async def test_a_cluster_over_zeromq_survives_restarts() -> None:
    """The same test on asyncio's own loop."""
    await _a_life_over_zeromq()


class _TickingCore(GreetingCore):
    """A core that wants a tick 1.3 ms after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.ticks: list[tuple[float, float]] = []  # when each was due, and when it came
        self.tick_at = time.monotonic()

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        if isinstance(message, Tick):
            assert self.tick_at is not None
            self.ticks.append((self.tick_at, now))
            self.tick_at = now + 0.0013
        return []

    def next_deadline(self) -> float | None:
        self.num_asked += 1
        return self.tick_at


def test_a_journal_tells_times_within_a_millisecond_apart() -> None:
    """On uvloop, whose own clock counts whole milliseconds, the node's clock is finer, and no deadline comes early."""

    async def ticks(folder: Path) -> list[tuple[float, float]]:
        hello = Hello(PROTOCOL_VERSION, role_of(G))
        core, entries = _TickingCore(), EntryList()
        node = replace(open_node(G, hello, ClusterSettings(), LocalNetwork(folder)), recorder=entries)
        actor = ClusterActor(core, node)
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            group.create_task(actor.run())
            while len(core.ticks) < 20:  # noqa: ASYNC110 -- the core has no event
                await asyncio.sleep(0.005)
            actor.stop()
        assert [entry.now for entry in entries.entries if isinstance(entry.message, Tick)] == [
            at for _, at in core.ticks
        ]
        assert core.num_asked < 5 * len(core.ticks)  # the actor does not spin until a deadline comes
        return core.ticks

    with (
        tempfile.TemporaryDirectory(prefix="as-") as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        os.chmod(name, 0o700)
        found = runner.run(ticks(Path(name)))
    assert all(now >= due for due, now in found)
    assert any(abs(1e3 * now - round(1e3 * now)) > 1e-3 for _, now in found)


async def test_nodes_take_bundles_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node says in its Hello that it takes bundles, and sends bundles to the processes that say so."""
    connected: dict[tuple[str, str], bool] = {}
    connect = ZmqTransport.connect

    def noting(self: ZmqTransport, peer: Peer, address: str, *, takes_bundles: bool = False) -> bool:
        if peer.incarnation != ANY_INCARNATION:
            connected[self.me.name, peer.name] = takes_bundles
        return connect(self, peer, address, takes_bundles=takes_bundles)

    monkeypatch.setattr(ZmqTransport, "connect", noting)
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        os.chmod(name, 0o700)
        network = LocalNetwork(Path(name))
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            nodes = [
                open_node(each, Hello(PROTOCOL_VERSION, role_of(each)), ClusterSettings(), network) for each in (C, G)
            ]
            actors = [ClusterActor(GreetingCore(), node) for node in nodes]
            for actor in actors:
                group.create_task(actor.run())
            while not all(actor.peers for actor in actors):  # noqa: ASYNC110 -- it waits for the states of two actors
                await asyncio.sleep(0.005)
            for actor in actors:
                actor.stop()
    assert connected == {(C, G): True, (G, C): True}
