"""Real worker processes with the fake engine under a supervisor: they meet on demand, and end when drained."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actorserve.actors.membership import COORDINATOR_NAME
from actorserve.actors.node import Node
from actorserve.actors.program import make_node
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import Drain, KVAccess, Message, MigrateTo, Peer, PeerDown, PeerUp, Role
from actorserve.errors import ProtocolError
from actorserve.model_files.locate import locate
from actorserve.processes import child, launch
from actorserve.processes.launch import Placement
from actorserve.processes.supervisor import Supervisor
from actorserve.settings import Settings, load_settings
from actorserve.wire.journal import read_entries
from tests.processes.test_supervisor import LIMITS, Recorder

DEADLINE_S = 120.0
W, W1 = "worker-0", "worker-1"


class Orders:
    """A coordinator's core that only knows who is up, and sends what a test wants."""

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
    with tempfile.TemporaryDirectory(prefix="as-") as folder:  # pytest's own have too long a path for sockets
        run = Path(folder) / "run"
        run.mkdir(mode=0o700)
        values = load_settings(None, {"workers": {"count": 2, "engine": "fake", "device": "cpu", "threads": 1}})
        values = launch.replace(values, "model", path=str(locate("default", lambda done, total: None)))
        yield launch.replace(values, "cluster", runtime_dir=str(run), journal_dir=str(run / "journals"))


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 -- what it waits for happens in other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"waited {DEADLINE_S:.0f} s for: {what}")


def _access(up: PeerUp) -> KVAccess | None:
    return None if up.worker is None else up.worker.kv


def _told(settings: Settings, name: str) -> list[Message]:
    """What the core of a worker has been told in all of its lives, as its journals have it."""
    found: list[Message] = []
    assert settings.cluster.journal_dir is not None
    for file in sorted(settings.cluster.journal_dir.glob(f"{name}-*.journal")):
        with file.open("rb") as journal:
            try:
                found += [entry.message for entry in read_entries(journal)]
            except ProtocolError as error:
                pytest.fail(f"{file}: {error}")
    return found


def _order(node: Node, core: Orders, peer: Peer, message: Message) -> None:
    core.next.append(Send(peer, message))
    node.inject(Drain())  # anything makes the core speak


@pytest.mark.e2e
@pytest.mark.model
async def test_workers_meet_and_end_when_they_are_told(settings: Settings) -> None:
    """Told to migrate to another, a worker is up to it, each with the other's KV access; told to drain, it ends for
    good, and the other loses it.
    """
    run = settings.cluster.runtime_dir
    assert run is not None
    settings_file = run / "settings.json"
    child.write_settings(settings, settings_file)
    specs, _ = launch.child_specs(Placement(2, (), 1), settings_file, run)
    recorder, core = Recorder(), Orders()
    supervisor = Supervisor(specs[2:], LIMITS, recorder, 5.0)

    def perform(effect: Effect) -> None:
        raise AssertionError(effect)

    unrecorded = settings.cluster.model_copy(update={"journal_dir": None})
    node = make_node(COORDINATOR_NAME, Role.COORDINATOR, core, perform, unrecorded, run)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        group.create_task(node.run())
        await _until(lambda: core.up.keys() == {W, W1}, "two workers")
        first, other = core.up[W], core.up[W1]
        _order(node, core, first, MigrateTo(other, 1, 60.0))
        for here, there in ((W, other), (W1, first)):
            await _until(
                lambda here=here, there=there: any(  # type: ignore[misc]
                    isinstance(message, PeerUp) and message.peer == there and _access(message) is not None
                    for message in _told(settings, here)
                ),
                f"{there.name} up at {here}",
            )
        _order(node, core, other, Drain())
        await recorder.until(lambda events: ("removed", W1, f"{W1} has stopped: it is not needed now") in events)
        await _until(lambda: PeerDown(other) in _told(settings, W), f"{W1} down at {W}")
        assert core.up == {W: first}
        supervisor.stop()
        node.stop()
    assert not any(event[0] == "restarting" for event in recorder.events)
