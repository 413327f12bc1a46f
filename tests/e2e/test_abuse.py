"""A running server (fake engine) survives hostile clients, garbage and failures, and reports each in one line."""

import asyncio
import os
import random
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import zmq

from actorserve.core.messages import Heartbeat, Peer
from actorserve.wire.codec import encode
from actorserve.wire.envelope import make_head
from tests.e2e.server import Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CONFIG = """
[cluster]
[workers]
count = 2
engine = "fake"
[supervision]
max_restarts = 1000
max_backoff_s = 0.2
"""
CHILDREN = ("coordinator", "gateway-0", "worker-0", "worker-1")
LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("abuse"), CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        yield server


def is_idle(server: Server) -> bool:
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(server.metric(name) == 0.0 for name in names)


def complete(server: Server, num_tokens: int = 4) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": num_tokens, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)


def pids(server: Server) -> list[int | None]:
    return [server.pid(name) for name in CHILDREN]


def num_descriptors(server: Server, name: str) -> int:
    return len(os.listdir(f"/proc/{server.pid(name)}/fd"))


def address(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def runtime_dir(server: Server) -> Path:
    arguments = Path(f"/proc/{server.pid('coordinator')}/cmdline").read_bytes().decode().split("\0")
    return Path(arguments[arguments.index("--runtime-dir") + 1])


def test_crowd_is_served(server: Server) -> None:
    """Five hundred clients at the same time all get an answer, and none is refused."""

    async def ask_all() -> list[int]:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            body = {"prompt": "hi", "max_tokens": 3}
            answers = await asyncio.gather(
                *(client.post(f"{server.url}/v1/completions", json=body) for _ in range(500))
            )
        return [answer.status_code for answer in answers]

    assert set(asyncio.run(ask_all())) == {200}
    wait_until(lambda: is_idle(server), "idle again")


def test_clients_that_leave_at_any_moment_free_everything(server: Server) -> None:
    """Clients that hang up, reset, or send half a request free their blocks and their connections."""
    dice = random.Random(7)
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=LONG)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: {len(request.content)}\r\n\r\n".encode()
    data = head + request.content
    before = num_descriptors(server, "gateway-0")

    async def come_and_go() -> None:
        reader, writer = await asyncio.open_connection(*address(server))
        part = data if dice.random() < 0.7 else data[: dice.randrange(len(data))]
        writer.write(part)
        await writer.drain()
        if part == data:
            await reader.readexactly(dice.choice([1, 100, 10_000]))
        if dice.random() < 0.5:
            linger = struct.pack("ii", 1, 0)  # a close that resets
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def all_of_them() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(come_and_go() for _ in range(100)))

    asyncio.run(all_of_them())
    wait_until(lambda: is_idle(server), "idle again")
    wait_until(lambda: num_descriptors(server, "gateway-0") <= before + 2, "connections closed")


def test_clients_that_never_read_delay_no_other_clients(server: Server) -> None:
    """Clients that do not read their streams do not delay other clients. When they leave, their resources are freed."""
    body = httpx.Request("POST", server.url, json=LONG | {"max_tokens": 300}).content
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    before = num_descriptors(server, "gateway-0")
    connections = [socket.create_connection(address(server)) for _ in range(20)]
    try:
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(request)
        assert complete(server).status_code == 200
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: is_idle(server), "idle again")
    wait_until(lambda: num_descriptors(server, "gateway-0") <= before + 2, "connections closed")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (os.urandom(1000).replace(b"\r\n", b"") + b"\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\rset-cookie: b\r\n\r\n", b"400"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
            b"400",
        ),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", b"501"),
        (b"BREW /v1/completions HTTP/1.0\r\n\r\n", b"405"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"404"),
    ],
    ids=lambda value: repr(value[:12]) if len(value) > 3 else value.decode(),
)
def test_broken_http_is_refused(server: Server, data: bytes, status: bytes) -> None:
    """Malformed HTTP/1 gets the right status, and the gateway goes on."""
    gateway = server.pid("gateway-0")
    with socket.create_connection(address(server), TIMEOUT_S) as client:
        client.sendall(data)
        assert client.recv(12) == b"HTTP/1.1 " + status
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.pid("gateway-0") == gateway


def test_garbage_on_every_socket_is_ignored(server: Server) -> None:
    """Floods of garbage, huge frames and frames for dead peers are counted, rarely logged, and have no effect."""
    before, logged_before = pids(server), len(server.log.read_text().splitlines())
    dropped = server.metric("actorserve_dropped_frames_total")
    stranger = Peer("stranger", 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for name in CHILDREN:
        life = int(server.journal(name).stem.rpartition("-")[2])
        frames = [os.urandom(200), b"", b"ASV1", make_head(stranger, Peer(name, life - 1)) + encode(Heartbeat())]
        frames += [
            make_head(stranger, Peer(name, life)) + rest for rest in (b"", b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff")
        ]
        flooding = context.socket(zmq.DEALER)
        flooding.setsockopt(zmq.SNDHWM, 0)
        flooding.setsockopt(zmq.LINGER, 10_000)
        flooding.connect(f"ipc://{runtime_dir(server)}/{name}.sock")
        for index in range(20_000):
            flooding.send(frames[index % len(frames)])
        flooding.send_multipart([b"x"] * 50)
        flooding.send(bytes(17 * 2**20))
        flooding.close()
        assert complete(server).status_code == 200
    context.term()
    wait_until(lambda: server.metric("actorserve_dropped_frames_total") >= dropped + 20_000, "garbage was counted")
    assert complete(server).status_code == 200
    assert pids(server) == before
    assert len(server.log.read_text().splitlines()) - logged_before < 100


def test_worker_that_stops_for_a_while_loses_nothing(server: Server) -> None:
    """A worker that pauses for longer than ``death_after_s``, and resumes, changes no answer."""
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "seed": 5}

    async def ask(num_requests: int) -> list[str]:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            answers = await asyncio.gather(
                *(client.post(f"{server.url}/v1/completions", json=body) for _ in range(num_requests))
            )
        return [answer.json()["choices"][0]["text"] for answer in answers]

    async def stopped() -> list[str]:
        asking = asyncio.create_task(ask(8))
        await asyncio.to_thread(wait_until, lambda: server.metric("vllm:num_requests_running") > 0, "requests run")
        server.signal("worker-0", signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait_until, lambda: server.num_reporting() == 1, "the stopped worker is given up")
        finally:
            server.signal("worker-0", signal.SIGCONT)
        return await asking

    undisturbed = asyncio.run(ask(1))
    assert set(asyncio.run(stopped())) == set(undisturbed)
    server.wait_workers(2)
    wait_until(lambda: is_idle(server), "idle again")


@pytest.mark.parametrize("victim", ["worker-0", "gateway-0"])
def test_child_that_dies_again_and_again_ends_everything(tmp_path: Path, default_model_path: Path, victim: str) -> None:
    """When supervision gives up, there is one clear line, a non-zero exit code, and no orphan."""
    config = CONFIG.replace("max_restarts = 1000", "max_restarts = 1")
    server = Server(tmp_path, config, "--model", str(default_model_path))
    server.wait_ready()
    seen = {pid for pid in pids(server) if pid is not None}
    first = server.pid(victim)
    server.signal(victim, signal.SIGKILL)
    wait_until(lambda: server.pid(victim) not in (None, first), "the victim's second life")
    seen |= {pid for pid in pids(server) if pid is not None}
    server.signal(victim, signal.SIGKILL)
    assert server.process.wait(TIMEOUT_S) == 1
    last = server.log.read_text().splitlines()[-1]
    assert last == f"actorserve: {victim} was killed by SIGKILL; that was failure 2 in 60 s"
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]


def test_gateway_that_cannot_write_its_journal_is_replaced(tmp_path: Path, default_model_path: Path) -> None:
    """A full disk under the journal ends the gateway at once, not after the drain, and the next one serves."""
    with running(tmp_path, CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        first = server.pid("gateway-0")
        assert first is not None
        idle = socket.create_connection(address(server))
        size = server.journal("gateway-0").stat().st_size
        resource.prlimit(first, resource.RLIMIT_FSIZE, (size + 1000, size + 1000))
        wait_until(lambda: server.pid("gateway-0") not in (None, first), "a new gateway", 15.0)
        idle.close()
        server.wait_workers(2)
        assert complete(server).status_code == 200
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("moment", ["importing", "loading"])
def test_early_ctrl_c_prints_no_traceback(tmp_path: Path, default_model_path: Path, moment: str) -> None:
    """Ctrl-C ends a start without a traceback, also while our own modules are still being imported."""
    server = Server(tmp_path, CONFIG, "--model", str(default_model_path))
    maps = Path(f"/proc/{server.process.pid}/maps")

    def has_come_so_far() -> bool:
        return "pydantic_core" in maps.read_text() if moment == "importing" else "coordinator" in server.log.read_text()

    wait_until(has_come_so_far, moment)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(TIMEOUT_S)
    assert "Traceback" not in server.log.read_text()
    assert "ready:" not in server.stdout.read_text()


@pytest.mark.parametrize("kind", ["port", "truncated", "pickle", "setting", "journal"])
def test_bad_start_is_one_line(tmp_path: Path, default_model_path: Path, kind: str) -> None:
    """A port in use, a truncated or pickled model, a wrong setting, no place for journals: the error is one line."""
    config, arguments = CONFIG, ["--model", str(default_model_path)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        match kind:
            case "port":
                arguments += ["--port", str(taken.getsockname()[1])]
            case "truncated":
                with default_model_path.open("rb") as whole:
                    (tmp_path / "part.gguf").write_bytes(whole.read(2_000_000))
                arguments = ["--model", str(tmp_path / "part.gguf")]
            case "pickle":
                (tmp_path / "config.json").write_text('{"model_type": "llama"}')
                (tmp_path / "pytorch_model.bin").write_bytes(b"x")
                arguments = ["--model", str(tmp_path)]
            case "setting":
                config = CONFIG.replace("count = 2", "count = -2")
            case "journal":
                (tmp_path / "journals").write_text("in the way")
        server = Server(tmp_path, config, *arguments)
        assert server.process.wait(60.0) == 1
    lines = server.log.read_text().splitlines()
    assert lines[-1].startswith("actorserve: ")
    assert "Traceback" not in server.log.read_text()
    assert sum(line.startswith("actorserve: ") for line in lines) == 1
