"""The node: incarnations, open files, and whole clusters over ZeroMQ."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.membership import COORDINATOR_NAME, Membership, WatchTimes
from actorserve.actors.node import Node, fresh_incarnation
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Peer, PeerUp
from actorserve.wire.zmq_transport import ZmqTransport
from tests.actors.cluster import GreetingCore, role_of

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
            f"ipc://{self._folder / C}",
            WatchTimes(0.05, 1.0),
        )
        core = self.cores[name] = GreetingCore()
        node = Node(transport, membership, asyncio.get_running_loop().time)
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
