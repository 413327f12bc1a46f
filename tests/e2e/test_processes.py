"""Real processes with the fake engine: starts, ends and deaths leak no block and no process."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from actorserve.core.instance.state import InstanceState
from actorserve.core.messages import PeerDown, Release
from actorserve.wire.journal import read_entries
from tests.e2e.server import Server, instance_of, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CONFIG = """
[cluster]
[workers]
count = 1
engine = "fake"
[supervision]
max_restarts = 1000
max_backoff_s = 0.2
"""
LONG = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("processes"), CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(1)
        yield server


def is_idle(server: Server) -> bool:
    return server.metric("vllm:kv_cache_usage_perc") == 0.0 and server.metric("vllm:num_requests_running") == 0.0


def worker_state(server: Server) -> InstanceState:
    """The worker's core, replayed from its journal."""
    return instance_of(server.journal("worker-0"))


def has_answered(server: Server) -> bool:
    """Whether a running request has several tokens, so that the first of them is on its way to the client."""
    return any(request.num_output > 3 for request in worker_state(server).requests.values())


def test_a_prompt_asked_again_is_cached(server: Server) -> None:
    """A repeated prompt finds its full blocks in the cache. Usage and metrics show it, and the answer is the same."""
    body = {"model": server.model, "prompt": list(range(100, 140)), "max_tokens": 20, "temperature": 0, "seed": 1}
    asked = [body, body, body | {"cache_salt": "tenant"}]
    answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json() for body in asked]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 32, 0]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert server.metric("vllm:prompt_tokens_cached_total") == 32
    wait_until(lambda: server.metric("vllm:prefix_cache_hits_total") == 32, "the worker's report")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    """When a client hangs up, its request is released, and its blocks are free after the iteration in flight."""

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            body = LONG | {"model": server.model, "stream": stream}
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            await asyncio.to_thread(wait_until, lambda: bool(worker_state(server).requests), "the request runs")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: not worker_state(server).requests, "the request is gone")
    wait_until(lambda: not worker_state(server).memory.waits_for_steps, "the iteration in flight has ended")
    state = worker_state(server)
    assert not state.outbox
    assert state.memory.device.num_free_blocks == state.config.num_blocks
    with server.journal("worker-0").open("rb") as file:
        assert any(isinstance(entry.message, Release) for entry in read_entries(file))
    wait_until(lambda: is_idle(server), "idle again")


def test_gateway_and_coordinator_load_no_torch(server: Server) -> None:
    """Only workers compute: no other running process has torch or a GPU driver in its memory."""
    for name in ("gateway-0", "coordinator"):
        maps = Path(f"/proc/{server.pid(name)}/maps").read_text()
        assert not [line for line in maps.splitlines() if "torch" in line or "nvidia-ml" in line]


def test_killed_gateway_leaks_no_block(server: Server) -> None:
    """A dead gateway's requests are freed after ``death_after_s``, and the next gateway serves again."""
    pid = server.pid("gateway-0")

    async def lose_gateway() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            body = LONG | {"model": server.model}
            tasks = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body)) for _ in range(8)]
            await asyncio.to_thread(wait_until, lambda: len(worker_state(server).requests) == 8, "eight requests")
            server.signal("gateway-0", signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, httpx.TransportError) for result in results)

    asyncio.run(lose_gateway())
    wait_until(lambda: not worker_state(server).requests, "all requests freed")
    state = worker_state(server)
    assert state.memory.device.num_free_blocks == state.config.num_blocks
    with server.journal("worker-0").open("rb") as file:
        assert any(isinstance(e.message, PeerDown) and e.message.peer.name == "gateway-0" for e in read_entries(file))
    wait_until(lambda: server.pid("gateway-0") not in (None, pid), "a new gateway")
    server.wait_workers(1)
    body = LONG | {"model": server.model, "max_tokens": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200


def test_new_coordinator_places_requests(server: Server) -> None:
    """After a kill the coordinator places requests as before."""
    server.signal("coordinator", signal.SIGKILL)
    body = LONG | {"model": server.model, "max_tokens": 50}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 50


def test_ctrl_c_drains_and_ends_with_zero(tmp_path: Path, default_model_path: Path) -> None:
    """Ctrl-C lets the running answer finish, ends every child, and the server exits with 0."""
    config = CONFIG.replace('engine = "fake"', 'engine = "fake"\nmax_batch_tokens = 80')
    with running(tmp_path, config, "--model", str(default_model_path)) as server:
        server.wait_workers(1)
        children = [server.pid(name) for name in ("coordinator", "gateway-0", "worker-0")]

        async def interrupted() -> httpx.Response:
            async with httpx.AsyncClient(timeout=120) as client:
                body = LONG | {"model": server.model, "max_tokens": 400}
                task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
                await asyncio.to_thread(wait_until, lambda: bool(worker_state(server).requests), "the request runs")
                server.process.send_signal(signal.SIGINT)
                return await task

        answer = asyncio.run(interrupted())
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 400
        assert server.process.wait(30) == 0
        for pid in children:
            assert pid is not None
            assert not Path(f"/proc/{pid}").exists()


def drained(server: Server, body: dict[str, object], then: Callable[[], None]) -> httpx.Response:
    """The answer to a request that runs when the server is told to end. ``then`` is called while it drains."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=120) as client:
            body_of_model = body | {"model": server.model}
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body_of_model))
            await asyncio.to_thread(wait_until, lambda: has_answered(server), "the request runs")
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: "stopping:" in server.log.read_text(), "the server drains")
            then()
            return await task

    return asyncio.run(ask())


def test_worker_that_dies_in_the_drain_is_restarted(tmp_path: Path, default_model_path: Path) -> None:
    """If the only worker is killed while the server drains, a new one finishes the answer; the exit code is 0."""
    with running(tmp_path, CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(1)
        answer = drained(server, LONG, lambda: server.signal("worker-0", signal.SIGKILL))
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert server.process.wait(30) == 0
        assert "worker-0 was killed by SIGKILL; starting it again" in server.log.read_text()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_drain_that_is_too_short_says_so(tmp_path: Path, default_model_path: Path, stream: bool) -> None:
    """A request that exceeds the drain's time ends with an error, one line counts it, and the exit code is 1."""
    config = CONFIG.replace("[cluster]", "[cluster]\ndrain_timeout_s = 0.5")
    with running(tmp_path, config, "--model", str(default_model_path)) as server:
        server.wait_workers(1)
        # A stopped worker generates no tokens, and counts as dead only after the drain's time is over.
        answer = drained(server, LONG | {"stream": stream}, lambda: server.signal("worker-0", signal.SIGSTOP))
        if stream:
            *_, error, done = answer.text.strip().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
            assert done == "data: [DONE]"
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
            assert int(answer.headers["retry-after"]) > 0
        assert server.process.wait(30) == 1
        last = server.log.read_text().strip().splitlines()[-1]
        assert last == "actorserve: gateway-0: 1 request(s) could not be finished in 0.5 s"


def test_worker_that_cannot_start_ends_everything(tmp_path: Path, default_model_path: Path) -> None:
    """A child that dies before it was ready ends the server with one clear line and a non-zero exit code."""
    config = CONFIG.replace('engine = "fake"', "kv_cache_bytes = 1")
    server = Server(tmp_path, config, "--model", str(default_model_path))
    wait_until(lambda: server.process.poll() is not None, "the end")
    assert server.process.returncode not in (0, None)
    last = server.log.read_text().strip().splitlines()[-1]
    assert last.startswith("actorserve: worker-0")
    assert "Traceback" not in server.log.read_text()


def test_children_die_with_a_killed_parent(tmp_path: Path, default_model_path: Path) -> None:
    """kill -9 of the supervisor leaves no orphaned process."""
    server = Server(tmp_path, CONFIG, "--model", str(default_model_path))
    server.wait_ready()
    children = [server.pid(name) for name in ("coordinator", "gateway-0", "worker-0")]
    assert None not in children
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all children dead")
