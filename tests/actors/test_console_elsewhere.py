"""Consoles on other hosts: who gets in by which key, what a key may do, and what the audit file says of the rest."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from actorserve.actors.audit import AUDIT_FILE, AuditFile
from actorserve.actors.console_desk import ConsoleDesk
from actorserve.console.arguments import console_parser
from actorserve.core.messages import Answer, Command, Heartbeat, Outcome
from actorserve.errors import ActorserveError
from actorserve.programs.console import main
from actorserve.wire.codec import encode
from actorserve.wire.console import ConsoleClient, ConsoleKeys, ConsoleServer, console_address
from actorserve.wire.curve.key_files import write_key_file
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.trust import Holder, HolderKind, HostKey, KeyPair, PublicKeys, Trust
from tests.folders import make_runtime_folder
from tests.wire.keys import make_pair

DEADLINE_S = 20.0
SHORT_S = 0.7
ALPHA, BETA, ANN, EVE, STRANGER = (make_pair() for _ in range(5))
KEYS = PublicKeys(
    {"alpha": HostKey(ALPHA.public_key), "beta": HostKey(BETA.public_key)},
    {"ann": ANN.public_key},
    {"eve": EVE.public_key},
)
CORDON = Command("act", "cordon", ("worker-0",))


class Desk:
    """A desk that answers what would go to the core, at a socket of this host and at one for other hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trust = Trust(ALPHA, KEYS)
        local = ConsoleServer(console_address(folder))
        self.desk = ConsoleDesk(local, AuditFile(folder), lambda: {"cluster.retry_s": 1.0})
        self.desk.serve_elsewhere("tcp://127.0.0.1:*", self.trust)
        self.address = self.desk._servers[1].address
        self.callers: list[str] = []
        self.desk.on_arrival(self._answer)

    def _answer(self) -> None:
        for peer, command in self.desk.take():
            self.callers.append(peer.name)
            self.desk.send(peer, Answer(command.command_id, Outcome.DONE, command.verb))

    async def ask(self, own: KeyPair, command: Command, timeout_s: float = DEADLINE_S) -> Answer | None:
        """Ask once, in another thread."""

        def run() -> Answer | None:
            client = self.client(own)
            try:
                return client.ask(command, timeout_s)
            finally:
                client.close()

        return await asyncio.to_thread(run)

    def client(self, own: KeyPair, server: KeyPair = ALPHA) -> ConsoleClient:
        return ConsoleClient(self.address, ConsoleKeys(own.public_key, own.secret_key, server.public_key))

    def audit(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / AUDIT_FILE).read_text().splitlines()]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    folder = make_runtime_folder()
    made = Desk(folder)
    yield made
    made.desk.close()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


async def _until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 -- the sockets signal nothing to the test
            await asyncio.sleep(0.005)


async def test_operators_act_and_viewers_read(desk: Desk) -> None:
    """An operator's act gets to the core, a viewer's is refused with a line in the audit file, and both may read."""
    assert await desk.ask(ANN, CORDON) == Answer("act", Outcome.DONE, "cordon")
    assert await desk.ask(EVE, Command("read", "status")) == Answer("read", Outcome.DONE, "status")
    refused = await desk.ask(EVE, CORDON)
    assert refused is not None
    assert (refused.outcome, refused.text) == (Outcome.REFUSED, "viewer eve is a viewer, and cordon needs an operator")
    assert desk.callers == ["console:operator ann", "console:viewer eve"]
    assert [(line["caller"], line["verb"], line["outcome"]) for line in desk.audit()] == [
        ("viewer eve", "cordon", "refused")
    ]


async def test_local_consoles_are_served_beside(desk: Desk) -> None:
    """The socket in the runtime folder works as before, at the same time."""

    def ask() -> Answer | None:
        client = ConsoleClient(console_address(desk.folder))
        try:
            return client.ask(Command("1", "status"), DEADLINE_S)
        finally:
            client.close()

    answers = await asyncio.gather(asyncio.to_thread(ask), desk.ask(ANN, Command("2", "status")))
    assert [answer.command_id for answer in answers if answer] == ["1", "2"]
    assert sorted(desk.callers) == ["console:local", "console:operator ann"]


@pytest.mark.parametrize(
    ("own", "reason"),
    [(STRANGER, "unknown key"), (BETA, "a command of host beta: not an operator's or viewer's key")],
)
async def test_other_keys_get_no_answer(desk: Desk, own: KeyPair, reason: str) -> None:
    """A stranger's key does not connect, and a host's key is no operator's; both are one line in the audit file."""
    for _ in range(3):
        assert await desk.ask(own, Command("1", "status"), SHORT_S) is None
    assert desk.callers == []
    (line,) = desk.audit()
    assert (line["caller"], line["verb"], line["outcome"]) == ("unknown", "connect", "refused")
    assert reason in line["text"]
    assert own.public_key in line["text"]


async def test_without_the_servers_key_there_is_no_answer(desk: Desk) -> None:
    """A console with another key of the server, or without any, is refused before it can send; it is audited."""
    for client in (desk.client(ANN, BETA), ConsoleClient(desk.address)):
        assert await asyncio.to_thread(client.ask, Command("1", "status"), SHORT_S) is None
        client.close()
    assert desk.callers == []
    (line,) = desk.audit()
    assert "failed handshake" in line["text"]


async def test_a_removed_operator_is_out_at_once(desk: Desk) -> None:
    """The next command on an open connection is dropped; a viewer who became an operator may act."""
    client = desk.client(ANN)
    assert await asyncio.to_thread(client.ask, CORDON, DEADLINE_S) is not None
    desk.trust.replace(replace(KEYS, operators={"eve": EVE.public_key}, viewers={}))
    assert await asyncio.to_thread(client.ask, replace(CORDON, command_id="2"), SHORT_S) is None
    client.close()
    assert await desk.ask(EVE, CORDON) == Answer("act", Outcome.DONE, "cordon")
    assert ["not an operator's or viewer's key" in line["text"] for line in desk.audit()] == [True]


async def test_a_flood_does_not_stop_operators(desk: Desk) -> None:
    """While strangers connect and a viewer sends garbage and commands without end, an operator is served, and the audit
    file stays short.
    """
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for number in range(40):
            raw = stack.enter_context(context.socket(zmq.DEALER))
            raw.setsockopt(zmq.LINGER, 0)
            connect_with_curve(raw, EVE if number % 2 else make_pair(), ALPHA.public_key)
            raw.connect(desk.address)
            for frame in (b"x" * 100, encode(Heartbeat()), encode(Command("1", "status"))) * 30:
                raw.send(frame)
        for number in range(5):
            assert await desk.ask(ANN, Command(str(number), "workers")) is not None
    await _until(lambda: len(desk.audit()) >= 15)
    assert len(desk.audit()) <= 21


def test_a_console_elsewhere_needs_keys(tmp_path: Path) -> None:
    """Without a key, with a malformed one, and with a file of keys that others may read, it does not start."""
    key = tmp_path / "ann.key"
    write_key_file(key, ANN, Holder(HolderKind.OPERATOR, "ann"))
    there = ("--connect", "tcp://127.0.0.1:9")
    with pytest.raises(ActorserveError, match="needs keys: --key and --server-key, or --key and --cluster"):
        main([*there, "--key", str(key), "status"])
    with pytest.raises(ActorserveError, match="needs keys"):
        main([*there, "--server-key", ALPHA.public_key, "status"])
    with pytest.raises(ActorserveError, match="the key of the server is not a key"):
        main([*there, "--key", str(key), "--server-key", "x", "status"])
    key.chmod(0o644)
    with pytest.raises(ActorserveError, match="others may read or write the key file"):
        main([*there, "--key", str(key), "--server-key", ALPHA.public_key, "status"])
    cluster = tmp_path / "cluster.toml"
    host = '[[host]]\nname = "alpha"\naddress = "127.0.0.1"\ngateways = 1\nworkers = 1\n'
    cluster.write_text(f'id = "x"\ncoordinators = ["alpha"]\n{host}')
    with pytest.raises(ActorserveError, match="host alpha has no public_key"):
        main(["--cluster", str(cluster), "--key", str(key), "status"])
    with pytest.raises(SystemExit):
        console_parser().parse_args(["--cluster", "x", "--connect", "y", "status"])


def test_a_server_that_does_not_answer_ends_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line on stderr says that the key may be the reason."""
    key = tmp_path / "ann.key"
    write_key_file(key, ANN, Holder(HolderKind.OPERATOR, "ann"))
    where = ("--connect", "tcp://127.0.0.1:9", "--server-key", ALPHA.public_key, "--key", str(key), "--timeout", "0.2")
    assert main([*where, "status"]) == 3
    assert "it may not accept your key" in capsys.readouterr().err
