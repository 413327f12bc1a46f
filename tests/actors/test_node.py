"""The node: order, effects, deadlines, crashes; and the whole of it once over ZeroMQ."""

import asyncio
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from actorserve.actors.death_watch import WatchTimes
from actorserve.actors.membership import COORDINATOR_NAME, Membership
from actorserve.actors.node import Node, fresh_incarnation
from actorserve.actors.program import open_journal
from actorserve.core.effects import Deliver, Effect, Send
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Close,
    Drain,
    Hello,
    Message,
    Peer,
    PeerDown,
    PeerUp,
    Role,
    Tick,
    Unplace,
)
from actorserve.errors import SettingsError
from actorserve.wire.journal import Entry
from actorserve.wire.memory_transport import Hub, MemoryTransport
from actorserve.wire.transport import Transport
from actorserve.wire.zmq_transport import ZmqTransport
from tests.actors.cluster import Cluster, GreetingCore, address_of, role_of

C, G, W = COORDINATOR_NAME, "gateway-0", "worker-0"


class ScriptedCore:
    """Answers each kind of message with the effects that a test gives it."""

    def __init__(self, effects: dict[type[Message], list[Effect]], deadline: float | None = None) -> None:
        self.effects = effects
        self.deadline = deadline
        self.seen: list[Message] = []

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        self.seen.append(message)
        if isinstance(message, Tick):
            self.deadline = None
        return self.effects.get(type(message), [])

    def next_deadline(self) -> float | None:
        return self.deadline


def _lone(
    core: ScriptedCore | GreetingCore, perform: Callable[[Effect], None], clock: Callable[[], float]
) -> tuple[Node, list[Entry]]:
    transport = MemoryTransport(Hub(), Peer(C, 1), address_of(C), clock)
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR, address_of(C))
    recorded: list[Entry] = []
    membership = Membership(transport, hello, address_of(C), WatchTimes())
    return Node(transport, membership, core, perform, clock, recorded.append), recorded


def test_local_messages_are_handled_in_order_after_their_cause() -> None:
    """What a perform injects is handled after what was injected before, in a later step, and all of it is recorded."""
    performed: list[Effect] = []
    core = ScriptedCore({Drain: [Deliver("r", (1,))]})

    def perform(effect: Effect) -> None:
        performed.append(effect)
        node.inject(Close("caused"))

    node, recorded = _lone(core, perform, lambda: 5.0)
    node.inject(Drain())
    node.inject(Close("later"))
    assert node.step()
    assert not node.step()
    assert core.seen == [Drain(), Close("later"), Close("caused")]
    assert performed == [Deliver("r", (1,))]
    assert recorded == [Entry(5.0, None, message) for message in core.seen]


def test_a_deadline_brings_one_tick() -> None:
    """The core is told Tick once its deadline has come, and not before."""
    now = 0.0
    core = ScriptedCore({}, deadline=1.0)
    node, _ = _lone(core, lambda effect: None, lambda: now)
    node.step()
    assert core.seen == []
    assert node.next_deadline() == 1.0
    now = 1.0
    node.step()
    node.step()
    assert core.seen == [Tick()]


def test_sends_to_the_dead_are_counted() -> None:
    """A Send to a peer that is not up goes nowhere and raises nothing."""
    node, _ = _lone(ScriptedCore({Drain: [Send(Peer(W, 1), Unplace("r", 1))]}), lambda effect: None, lambda: 0.0)
    node.inject(Drain())
    node.step()
    assert node.counts["sends to a peer that is down"] == 1


def test_who_went_down_is_told_once_the_core_knows() -> None:
    """``on_down`` hears of each peer's end, after what the core had done for it, and of nothing else."""
    told: list[Effect | Peer] = []
    core = ScriptedCore({PeerDown: [Deliver("r", (1,))]})
    transport = MemoryTransport(Hub(), Peer(C, 1), address_of(C), lambda: 0.0)
    membership = Membership(
        transport, Hello(PROTOCOL_VERSION, Role.COORDINATOR, address_of(C)), address_of(C), WatchTimes()
    )
    node = Node(transport, membership, core, told.append, lambda: 0.0, on_down=told.append)
    for message in (PeerUp(Peer(W, 1), Role.WORKER), PeerDown(Peer(W, 1)), Drain()):
        node.inject(message)
    node.step()
    assert told == [Deliver("r", (1,)), Peer(W, 1)]


def test_only_its_owner_reads_a_journal(tmp_path: Path) -> None:
    """A journal holds prompts and keys, so its file is private from the first byte on."""
    with open_journal(tmp_path / "new", Peer(W, 7)) as journal:
        assert stat.S_IMODE(os.fstat(journal.fileno()).st_mode) == 0o600
    assert (tmp_path / "new" / f"{W}-7.journal").exists()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_journal_is_written_into_no_file_of_others(tmp_path: Path) -> None:
    """A file or a link that somebody has put at a journal's path is neither written to nor followed."""
    target = tmp_path / "target"
    (tmp_path / f"{W}-7.journal").symlink_to(target)
    (tmp_path / f"{W}-8.journal").write_text("mine", encoding="utf-8")
    for incarnation in (7, 8):
        with pytest.raises(FileExistsError):
            open_journal(tmp_path, Peer(W, incarnation))
    assert not target.exists()
    assert (tmp_path / f"{W}-8.journal").read_text(encoding="utf-8") == "mine"


def test_a_journal_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the folder could take the journal away or put another in its place."""
    monkeypatch.setattr("actorserve.actors.program.os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SettingsError, match="belongs to another user"):
        open_journal(tmp_path, Peer(W, 7))
    assert list(tmp_path.iterdir()) == []


def test_a_recorded_log_replays_to_the_same_end() -> None:
    """What was recorded of a disturbed cluster, told to a fresh core, leaves it as the live one."""
    cluster = Cluster()
    for name in (C, G, W):
        cluster.start(name, 1)
    cluster.advance(1.0)
    cluster.kill(W)
    cluster.start(W, 2)
    cluster.advance(3.0)
    live, replayed = cluster.processes[G].core, GreetingCore()
    for entry in cluster.processes[G].recorded:
        replayed.handle(entry.message, entry.now, sender=entry.sender)
    assert replayed == live
    assert live.downs == 1


async def test_a_bug_in_the_core_ends_the_node_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An exception from the core leaves run, after one critical line, and the transport is closed."""
    loop = asyncio.get_running_loop()
    core = GreetingCore()
    node, _ = _lone(core, lambda effect: None, loop.time)
    node.inject(PeerDown(Peer("never met", 1)))
    with pytest.raises(KeyError):
        await asyncio.wait_for(node.run(), 5)
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]
    assert "KeyError" in caplog.text


async def test_a_bug_in_performing_ends_the_node_too() -> None:
    """An exception from perform leaves run."""

    def perform(effect: Effect) -> None:
        raise OSError("disk full")

    node, _ = _lone(ScriptedCore({Drain: [Deliver("r", (1,))]}), perform, asyncio.get_running_loop().time)
    node.inject(Drain())
    with pytest.raises(OSError, match="disk full"):
        await asyncio.wait_for(node.run(), 5)


async def test_stopping_ends_run_and_handles_nothing_more() -> None:
    """After stop, run returns and what is injected goes nowhere; stopping again does nothing."""
    core = ScriptedCore({})
    node, _ = _lone(core, lambda effect: None, asyncio.get_running_loop().time)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await asyncio.sleep(0)
        node.stop()
        node.stop()
        node.inject(Drain())
    assert core.seen == []


def test_fresh_incarnations_grow() -> None:
    """An incarnation drawn a moment later is larger."""
    first = fresh_incarnation()
    deadline = time.monotonic() + 5
    while fresh_incarnation() <= first:
        assert time.monotonic() < deadline


class _Live:
    """Nodes over ZeroMQ, each a task of one group."""

    def __init__(self, folder: Path, group: asyncio.TaskGroup) -> None:
        self._folder = folder
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.cores: dict[str, GreetingCore] = {}
        self.nodes: dict[str, Node] = {}

    def start(self, name: str) -> None:
        address = f"ipc://{self._folder / name}"
        transport: Transport = ZmqTransport(Peer(name, fresh_incarnation()), address)
        membership = Membership(
            transport,
            Hello(PROTOCOL_VERSION, role_of(name), address),
            f"ipc://{self._folder / C}",
            WatchTimes(0.05, 1.0),
        )
        core = self.cores[name] = GreetingCore()
        node = self.nodes[name] = Node(transport, membership, core, print, asyncio.get_running_loop().time)
        self._tasks[name] = self._group.create_task(node.run())

    async def kill(self, name: str) -> None:
        task = self._tasks.pop(name)
        del self.nodes[name], self.cores[name]
        task.cancel()
        await asyncio.wait([task])

    def is_steady(self) -> bool:
        everybody = {node.me for node in self.nodes.values()}
        return all(core.up == core.greeted_by == everybody - {self.nodes[name].me} for name, core in self.cores.items())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 -- what it waits for is the state of several cores
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
            for node in live.nodes.values():
                node.stop()


def test_a_cluster_over_zeromq_on_uvloop_survives_restarts() -> None:
    """Over real sockets, coordinator, worker and gateway die and return in turn, and all meet all again each time."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_a_life_over_zeromq())


async def test_a_cluster_over_zeromq_survives_restarts() -> None:
    """The same on asyncio's own loop."""
    await _a_life_over_zeromq()


async def test_a_deadline_that_moves_wakes_the_node_in_time() -> None:
    """A node that waits for a late deadline ticks at an earlier one that a message brings, and then at the late one."""
    loop = asyncio.get_running_loop()
    began = loop.time()
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
    node, _ = _lone(core, lambda effect: None, loop.time)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await asyncio.sleep(0)
        node.inject(Drain())
        await both.wait()
        node.stop()
    assert core.seen == [Drain(), Tick(), Tick()]
    assert ticks[0] >= began + 0.05
    assert ticks[1] >= began + 0.2


def test_a_process_may_open_as_many_files_as_it_ever_may() -> None:
    """The bound on open files is the hard one afterwards, and what sockets are counted by."""
    code = (
        "import resource\n"
        "from actorserve.actors.program import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "assert raise_file_limit() == 300\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
