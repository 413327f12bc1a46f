"""Real worker processes with the fake engine under a supervisor: they meet on demand, and end when drained."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actorserve.actors.cluster_actor import ClusterActor
from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.node import open_node
from actorserve.actors.supervisor import Supervisor
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Drain,
    Hello,
    KVAccess,
    Message,
    MigrateTo,
    Peer,
    PeerDown,
    PeerUp,
    Role,
)
from actorserve.errors import ProtocolError
from actorserve.model_files.locate import locate
from actorserve.processes import child, launch
from actorserve.processes.launch import Placement
from actorserve.processes.supervision import Removed, Restarting, SupervisionTree
from actorserve.processes.supervision_tree import supervision_tree
from actorserve.settings import Settings, load_settings
from actorserve.wire.journal import read_entries
from tests.actors.children import LIMITS, Recorder

DEADLINE_S = 120.0
W, W1 = "worker-0", "worker-1"


class Orders:
    """A coordinator's core that only knows which peers are up, and sends the messages that a test gives it."""

    def __init__(self) -> None:
        self.up: dict[str, Peer] = {}
        self.next: list[Send] = []

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        match message:
            case PeerUp(peer=peer):
                self.up[peer.name] = peer
            case PeerDown(peer=peer):
                self.up.pop(peer.name)
        effects: list[Effect] = [*self.next]
        self.next.clear()
        return effects

    def next_deadline(self) -> float | None:
        return None


@pytest.fixture
def settings() -> Iterator[Settings]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:  # pytest's own folders have too long a path for sockets
        run = Path(folder) / "run"
        run.mkdir(mode=0o700)
        values = load_settings(None, {"workers": {"count": 2, "engine": "fake", "device": "cpu", "threads": 1}})
        values = launch.replace(values, "model", path=str(locate("default", lambda done, total: None)))
        yield launch.replace(values, "cluster", runtime_dir=str(run), journal_dir=str(run / "journals"))


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 -- it waits for other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"waited {DEADLINE_S:.0f} s for: {what}")


def _access(up: PeerUp) -> KVAccess | None:
    return None if up.worker is None else up.worker.kv


def _told(settings: Settings, name: str) -> list[Message]:
    """The messages that a worker's core got in all of its lives, from its journals."""
    found: list[Message] = []
    assert settings.cluster.journal_dir is not None
    for file in sorted(settings.cluster.journal_dir.glob(f"{name}-*.journal")):
        with file.open("rb") as journal:
            try:
                found += [entry.message for entry in read_entries(journal)]
            except ProtocolError as error:
                pytest.fail(f"{file}: {error}")
    return found


def _order(actor: ClusterActor, core: Orders, peer: Peer, message: Message) -> None:
    core.next.append(Send(peer, message))
    actor.tell(Drain())  # the core sends at any message


@pytest.mark.e2e
@pytest.mark.model
async def test_workers_meet_and_end_when_they_are_told(settings: Settings) -> None:
    """A worker with an order to migrate meets the destination, and both get the other's KV access. A drained worker
    ends for good, and the other worker loses it.
    """
    run = settings.cluster.runtime_dir
    assert run is not None
    settings_file = run / "settings.json"
    child.write_settings(settings, settings_file)
    workers = supervision_tree(Placement(2, (), 1), settings, settings_file, run).children[2:]
    recorder, core = Recorder(), Orders()
    supervisor = Supervisor(SupervisionTree(workers, (), LIMITS, 5.0), recorder)
    unrecorded = settings.cluster.model_copy(update={"journal_dir": None})
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR)
    coordinator = ClusterActor(core, open_node(COORDINATOR_NAME, hello, unrecorded, LocalNetwork(run)))
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        group.create_task(coordinator.run())
        await _until(lambda: core.up.keys() == {W, W1}, "two workers")
        first, second = core.up[W], core.up[W1]
        _order(coordinator, core, first, MigrateTo(second, 1, 60.0))
        for here, there in ((W, second), (W1, first)):
            await _until(
                lambda here=here, there=there: any(  # type: ignore[misc]
                    isinstance(message, PeerUp) and message.peer == there and _access(message) is not None
                    for message in _told(settings, here)
                ),
                f"{there.name} up at {here}",
            )
        _order(coordinator, core, second, Drain())
        await recorder.until(lambda news: Removed(W1, f"{W1} has stopped: it is not needed now") in news)
        await _until(lambda: PeerDown(second) in _told(settings, W), f"{W1} down at {W}")
        assert core.up == {W: first}
        supervisor.shut_down()
        coordinator.stop()
    assert not any(isinstance(news, Restarting) for news in recorder.news)
