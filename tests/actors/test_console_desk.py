"""The coordinator's desk: what callers may do, the audit file, and commands on their way through the actor."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actorserve.actors.audit import AUDIT_FILE, AuditFile
from actorserve.actors.console_desk import ConsoleDesk, flattened
from actorserve.actors.coordinator import CoordinatorActor
from actorserve.core.cluster.config import ClusterConfig
from actorserve.core.cluster.state import ClusterState
from actorserve.core.effects import Audit
from actorserve.core.messages import (
    ActsDone,
    Answer,
    Command,
    InstanceRole,
    LoadReport,
    ModelInfo,
    Outcome,
    Peer,
    PeerUp,
    Role,
    WorkerInfo,
)
from actorserve.core.operations.verbs import OperatorRole
from actorserve.errors import SettingsError
from actorserve.wire.console import Caller, ConsoleClient, ConsoleServer, LocalCallers, console_address
from tests.actors.cluster import lone_node
from tests.folders import make_runtime_folder

DEADLINE_S = 20.0
A = Peer("worker-0", 1)
ACT = Audit("local", Command("7", "cordon", ("worker-0",)), Outcome.DONE, "worker-0: gets no more requests")


class Viewers(LocalCallers):
    """All callers are viewers."""

    def identify(self, user_id: str) -> Caller | None:
        return Caller("vera", OperatorRole.VIEWER)


class Coordinator:
    """A coordinator actor with one worker, which serves consoles on a socket."""

    def __init__(self, folder: Path, callers: LocalCallers) -> None:
        self.folder = folder
        self.core = ClusterState(ClusterConfig(100, 1.0))
        self.core.handle(PeerUp(A, Role.WORKER, WorkerInfo("k", ModelInfo("m", 100, 1000))), 0.0)
        self.core.handle(LoadReport(1, 0, 0, 1000, 0, 0, 10, 10, 0), 0.0, A)
        server = ConsoleServer(console_address(folder), callers)
        settings = {"cluster.retry_s": 1.0, "cluster.round_s": 0.25, "http.port": 8000}
        desk = ConsoleDesk(server, AuditFile(folder), lambda: settings)
        clock = asyncio.get_running_loop().time
        self.actor = CoordinatorActor(self.core, lone_node("coordinator", clock), desk=desk)
        self.running = asyncio.create_task(self.actor.run())

    async def ask(self, verb: str, *arguments: str, command_id: str = "1") -> Answer:
        def run() -> Answer | None:
            client = ConsoleClient(console_address(self.folder))
            try:
                return client.ask(Command(command_id, verb, arguments), DEADLINE_S)
            finally:
                client.close()

        answer = await asyncio.to_thread(run)
        assert answer is not None
        return answer

    async def stop(self) -> None:
        self.actor.stop()
        await self.running


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    folder = make_runtime_folder()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


async def test_an_operator_acts_and_is_audited(folder: Path) -> None:
    """The core does it; the file, and the verb ``audit``, have one line; and a new coordinator knows the answer."""
    coordinator = Coordinator(folder, LocalCallers())
    done = await coordinator.ask("cordon", "worker-0")
    assert done == Answer("1", Outcome.DONE, "worker-0: gets no more requests")
    shown = await coordinator.ask("audit")
    assert [column.texts for column in shown.columns[1:]] == [
        ("local",),
        ("cordon",),
        ("worker-0",),
        ("done",),
        ("worker-0: gets no more requests",),
    ]
    await coordinator.stop()
    (line,) = (folder / AUDIT_FILE).read_text().splitlines()
    assert json.loads(line)["caller"] == "local"
    again = Coordinator(folder, LocalCallers())
    assert await again.ask("cordon", "worker-0") == done
    await again.stop()
    assert len((folder / AUDIT_FILE).read_text().splitlines()) == 1


@pytest.mark.parametrize("act", [("budget", "1000"), ("role", "worker-0", "token")])
async def test_a_viewer_changes_neither_power_nor_roles(act: tuple[str, ...], folder: Path) -> None:
    """A viewer's budget and role are refused, and the core keeps its own."""
    coordinator = Coordinator(folder, Viewers())
    refused = await coordinator.ask(*act)
    assert (refused.outcome, refused.text) == (Outcome.REFUSED, f"vera is a viewer, and {act[0]} needs an operator")
    assert coordinator.core.power.governor.budget_watts is None
    assert coordinator.core.fleet.views[A].pool is InstanceRole.MIXED
    await coordinator.stop()


async def test_a_viewer_reads_and_does_not_act(folder: Path) -> None:
    """A viewer's act is refused in one line, audited, and never reaches the core."""
    coordinator = Coordinator(folder, Viewers())
    assert (await coordinator.ask("workers")).outcome is Outcome.DONE
    refused = await coordinator.ask("cordon", "worker-0", command_id="2")
    assert (refused.outcome, refused.text) == (Outcome.REFUSED, "vera is a viewer, and cordon needs an operator")
    assert coordinator.core.fleet.views[A].is_healthy
    assert json.loads((folder / AUDIT_FILE).read_text())["caller"] == "vera"
    await coordinator.stop()


async def test_settings_are_shown_by_name_and_by_section(folder: Path) -> None:
    """All of them, one, or a section's; an unknown one names the nearest."""
    coordinator = Coordinator(folder, LocalCallers())
    shown = await coordinator.ask("config", "cluster")
    assert [column.texts for column in shown.columns] == [("cluster.retry_s", "cluster.round_s"), ("1.0", "0.25")]
    unknown = await coordinator.ask("config", "http.prt")
    assert unknown.text == "there is no setting http.prt; did you mean http.port?"
    await coordinator.stop()


def test_the_audit_file_is_appended_and_read_again(tmp_path: Path) -> None:
    """A new process appends to the lines of the last one, and leaves out a line that a crash cut off."""
    first = AuditFile(tmp_path)
    first.write(ACT)
    first.close()
    with (tmp_path / AUDIT_FILE).open("a") as file:
        file.write('{"time": "cut o')
    second = AuditFile(tmp_path)
    assert second.acts_done() == ActsDone(("7",), (Outcome.DONE,), (ACT.text,))
    second.close()
    assert (tmp_path / AUDIT_FILE).stat().st_mode & 0o777 == 0o600


def test_an_audit_file_of_others_is_refused(tmp_path: Path) -> None:
    """A link, and a folder that cannot be made, are errors of one line."""
    (tmp_path / "target").touch()
    (tmp_path / AUDIT_FILE).symlink_to(tmp_path / "target")
    with pytest.raises(SettingsError, match="cannot open the audit file"):
        AuditFile(tmp_path)
    with pytest.raises(SettingsError, match="cannot open the audit file"):
        AuditFile(tmp_path / "target" / "below")


def test_a_line_after_one_that_was_cut_off_is_whole(tmp_path: Path) -> None:
    """The next act begins a line of its own."""
    (tmp_path / AUDIT_FILE).write_text('{"time": "cut o')
    os.chmod(tmp_path / AUDIT_FILE, 0o600)
    first = AuditFile(tmp_path)
    first.write(ACT)
    first.close()
    second = AuditFile(tmp_path)
    assert second.acts_done().command_ids == ("7",)
    second.close()


def test_settings_have_dotted_names() -> None:
    """Sections are joined by dots, and what is not set says so."""
    assert flattened({"a": {"b": 1, "c": None}, "d": {}}) == {"a.b": 1, "a.c": "not set", "d": {}}
