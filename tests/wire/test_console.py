"""The operators' socket: answers go back where the command came from, and no console can harm the coordinator."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from actorserve.core.messages import Answer, Column, Command, Heartbeat, Outcome, Peer
from actorserve.core.operations.verbs import OperatorRole
from actorserve.errors import ActorserveError
from actorserve.wire.codec import encode
from actorserve.wire.console import MAX_COMMAND_BYTES, Caller, ConsoleClient, ConsoleServer, console_address
from tests.folders import make_runtime_folder

DEADLINE_S = 20.0


class Server:
    """A console's server that answers every command with the command's verb."""

    def __init__(self, folder: Path) -> None:
        self.address = console_address(folder)
        self.console = ConsoleServer(self.address)
        self.taken: list[tuple[Peer, Caller, Command]] = []
        self.columns: tuple[Column, ...] = ()
        self.console.on_arrival(self._answer)

    def _answer(self) -> None:
        for peer, caller, command in self.console.take():
            self.taken.append((peer, caller, command))
            self.console.send(peer, Answer(command.command_id, Outcome.DONE, command.verb, self.columns))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 -- the sockets signal nothing to the test
                await asyncio.sleep(0.005)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    folder = make_runtime_folder()
    running = Server(folder)
    yield running
    running.console.close()
    (folder / "console.sock").unlink(missing_ok=True)
    folder.rmdir()


async def ask(address: str, *commands: Command, timeout_s: float = DEADLINE_S) -> list[Answer | None]:
    """Ask over one connection, in another thread."""

    def run() -> list[Answer | None]:
        client = ConsoleClient(address)
        try:
            return [client.ask(command, timeout_s) for command in commands]
        finally:
            client.close()

    return await asyncio.to_thread(run)


async def test_answers_go_back_over_the_connection(server: Server) -> None:
    """Two consoles at once get their own answers, are two callers for the core, and are local operators."""
    answers = await asyncio.gather(
        ask(server.address, Command("1", "status"), Command("2", "workers")), ask(server.address, Command("3", "top"))
    )
    assert [[answer.text for answer in one if answer] for one in answers] == [["status", "workers"], ["top"]]
    assert {caller for _, caller, _ in server.taken} == {Caller("local", OperatorRole.OPERATOR)}
    assert len({peer for peer, _, _ in server.taken}) == 2
    assert {peer.name for peer, _, _ in server.taken} == {"console:local"}


async def test_many_commands_at_once_are_all_answered(server: Server) -> None:
    """More commands than one turn takes are answered in the next turns."""
    answers = await ask(server.address, *(Command(str(number), "status") for number in range(90)))
    assert None not in answers


async def test_garbage_is_counted_and_harms_nobody(server: Server) -> None:
    """Frames that are no command, too long or of several parts are dropped; other consoles are still answered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(server.address)
    for frames in ([b""], [b"\xff" * 100], [b"a", b"b"], [encode(Heartbeat())], [encode(Answer("1", Outcome.DONE))]):
        dealer.send_multipart(frames)
    await server.until(lambda: server.console.counts["dropped: malformed command"] == 5)
    dealer.send(b"x" * (MAX_COMMAND_BYTES + 1))  # libzmq closes this connection
    (answer,) = await ask(server.address, Command("1", "status"))
    assert answer is not None
    assert len(server.taken) == 1
    dealer.close(0)
    context.term()


async def test_a_flood_is_cut(server: Server) -> None:
    """A console that sends thousands of commands gets answers to a bounded number of them; others are served."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(server.address)
    frame = encode(Command("1", "status"))

    def flood() -> None:
        for _ in range(3000):
            dealer.send(frame)
            if dealer.poll(0):
                dealer.recv()

    await asyncio.to_thread(flood)
    (answer,) = await ask(server.address, Command("2", "status"))
    assert answer is not None
    await server.until(lambda: server.console.counts["dropped: flood"] > 2000)
    dealer.close(0)
    context.term()


async def test_a_console_that_does_not_read_is_dropped(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """When its bounded queue of answers is full, it is dropped with a line, and others are served."""
    server.columns = (Column("x", texts=("y" * 250,) * 4000),)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(server.address)
    with caplog.at_level(logging.WARNING, "actorserve.console"):
        for number in range(400):
            dealer.send(encode(Command(str(number), "top")))
            await asyncio.sleep(0.002)
            if "does not read" in caplog.text:
                break
        await server.until(lambda: "does not read its answers, and is dropped" in caplog.text)
    server.columns = ()
    (answer,) = await ask(server.address, Command("2", "status"))
    assert answer is not None
    dealer.close(0)
    context.term()


async def test_no_server_means_no_answer(tmp_path: Path) -> None:
    """A console gives up after its time if nobody answers."""
    assert await ask(f"ipc://{tmp_path}/none.sock", Command("1", "status"), timeout_s=0.05) == [None]


async def test_an_answer_to_an_earlier_command_is_skipped(server: Server) -> None:
    """After a timeout, the late answer is not taken for the answer to the next command."""
    client = ConsoleClient(server.address)
    try:
        assert client.ask(Command("1", "slow"), 1e-9) is None
        found = await asyncio.to_thread(client.ask, Command("2", "status"), DEADLINE_S)
        assert found is not None
        assert (found.command_id, found.text) == ("2", "status")
    finally:
        client.close()


async def test_an_address_that_cannot_be_used_is_an_error() -> None:
    """Both sides say so in one line."""
    with pytest.raises(ActorserveError, match="consoles cannot connect at ipc:///no/such"):
        ConsoleServer("ipc:///no/such/folder/console.sock")
    with pytest.raises(ActorserveError, match="cannot connect to nonsense"):
        ConsoleClient("nonsense")
