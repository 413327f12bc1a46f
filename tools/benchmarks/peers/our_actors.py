"""Two of our actors, as in production, with cores that only call and answer. Run with a folder.

Transport, codec, envelopes, membership and heartbeats are the real ones. The answering actor is a coordinator and the
calling one a gateway, because these two roles are linked.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import uvloop

from actorserve.actors.cluster_actor import ClusterActor, ClusterCore
from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.node import open_node
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Message, Peer, PeerUp, Place, Placed, Role, Tick
from actorserve.errors import ActorserveError
from actorserve.processes.signals import on_termination
from actorserve.processes.status import PARENT_PID, attach
from actorserve.settings import ClusterSettings
from tools.benchmarks.peers.calls import INSTANCE, Processes, request_id, serve, windows

_ANSWER = "answer"
_START_TIMEOUT_S = 20.0
_CALLS_TIMEOUT_S = 300.0


class _AnsweringCore:
    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        if type(message) is Place and sender is not None:
            return [Send(sender, Placed(message.request_id, message.epoch, Peer(*INSTANCE)))]
        return []

    def next_deadline(self) -> float | None:
        return None


class _CallingCore:
    """Sends a window when all calls of the last one are answered. Other threads wait for ``is_met`` and ``done``."""

    def __init__(self) -> None:
        self.is_met = threading.Event()
        self.done: Future[list[float]] = Future()
        self._other: Peer | None = None
        self._windows: list[int] = []
        self._num_open = 0
        self._began = 0.0
        self._times: list[float] = []

    def prepare(self, counts: list[int]) -> "Future[list[float]]":
        """Set the windows that the next Tick begins. The result holds the seconds of each window."""
        self._windows = counts[::-1]
        self._times = []
        self.done = Future()
        return self.done

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        if type(message) is Placed:
            self._num_open -= 1
            if self._num_open:
                return []
            self._times.append(time.perf_counter() - self._began)
            if not self._windows:
                self.done.set_result(self._times)
                return []
            return self._send_window()
        if type(message) is PeerUp:
            self._other = message.peer
            self.is_met.set()
        elif type(message) is Tick:
            return self._send_window()
        return []

    def next_deadline(self) -> float | None:
        return None

    def _send_window(self) -> list[Effect]:
        assert self._other is not None
        self._began = time.perf_counter()
        self._num_open = self._windows.pop()
        return [Send(self._other, Place(request_id(number), 1, 512)) for number in range(self._num_open)]


class OurCaller:
    """Implements ``calls.Caller``. The actor runs in a thread of its own, and this thread gives it calls."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._other = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.benchmarks.peers.our_actors", _ANSWER, folder],
            stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_PID: str(os.getpid())},
        )
        self._core = _CallingCore()
        self._actor: ClusterActor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        if not self._core.is_met.wait(_START_TIMEOUT_S):
            self.close()
            raise ActorserveError("the two processes do not connect")

    def one_at_a_time(self, num_calls: int) -> list[float]:
        return self._calls([1] * num_calls)

    def pipelined(self, num_calls: int, window: int) -> float:
        return sum(self._calls(windows(num_calls, window)))

    def processes(self) -> Processes:
        pair = os.getpid(), self._other.pid
        return Processes(pair, pair)

    def close(self) -> None:
        if self._loop is not None and self._actor is not None:
            self._loop.call_soon_threadsafe(self._actor.stop)
        self._thread.join()
        self._other.kill()
        self._other.wait()

    def _calls(self, counts: list[int]) -> list[float]:
        assert self._loop is not None
        assert self._actor is not None
        done = self._core.prepare(counts)
        self._loop.call_soon_threadsafe(self._actor.tell, Tick())
        return done.result(_CALLS_TIMEOUT_S)

    async def _run(self) -> None:
        self._actor = _actor("gateway-0", Role.GATEWAY, self._core, self._folder)
        self._loop = asyncio.get_running_loop()
        await self._actor.run()


async def _answer(folder: Path) -> None:
    actor = _actor(COORDINATOR_NAME, Role.COORDINATOR, _AnsweringCore(), folder)
    on_termination(actor.stop)
    await actor.run()


def _actor(name: str, role: Role, core: ClusterCore, folder: Path) -> ClusterActor:
    hello = Hello(PROTOCOL_VERSION, role)
    return ClusterActor(core, open_node(name, hello, ClusterSettings(), LocalNetwork(folder)))


if __name__ == "__main__":
    if sys.argv[1] == _ANSWER:
        attach()
        uvloop.run(_answer(Path(sys.argv[2])))
        sys.exit()
    sys.exit(serve(OurCaller, (ActorserveError, OSError)))
