"""The console with real processes: workers are drained, restarted and cordoned under streams that notice nothing."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.clients import Clients
from tests.e2e.operator import Console
from tests.e2e.server import Server, running, wait_until
from tests.folders import make_runtime_folder

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NUM_STREAMS = 5
MAX_TOKENS = 200
DEADLINE_S = 120.0
CONFIG = """
[cluster]
runtime_dir = "{runtime_dir}"
heartbeat_s = 0.2
death_after_s = 1.5
load_report_s = 0.1
retry_s = 0.3
round_s = 0.1
[workers]
count = 3
engine = "fake"
kv_cache_bytes = 65536
max_batch_requests = 16
[supervision]
max_restarts = 2
backoff_s = 0.1
"""


async def all_workers_have_requests(console: Console) -> None:
    def is_so() -> bool:
        rows = console.rows("workers")
        return len(rows) == 3 and all(row["running"] > 0 for row in rows if row["state"] == "open")

    await asyncio.to_thread(wait_until, is_so, "requests on all workers", DEADLINE_S)


def test_workers_are_drained_restarted_and_cordoned_under_streams(tmp_path: Path) -> None:
    """No request fails and no token differs while each worker is drained, restarted and opened again."""
    runtime_dir = make_runtime_folder()
    with running(tmp_path, CONFIG.format(runtime_dir=runtime_dir)) as server:
        asyncio.run(_drain_and_restart(server, Console(runtime_dir)))


async def _drain_and_restart(server: Server, console: Console) -> None:
    await asyncio.to_thread(server.wait_workers, 3)
    clients = Clients(server, NUM_STREAMS, MAX_TOKENS)
    await clients.learn()
    async with clients.running():
        await all_workers_have_requests(console)
        await console.ask("drain", "worker-0", "--wait", "--wait-s", str(DEADLINE_S))
        assert (await asyncio.to_thread(console.states))["worker-0"] == "empty"
        before = clients.num_answers
        await asyncio.to_thread(wait_until, lambda: clients.num_answers > before + NUM_STREAMS, "answers", DEADLINE_S)
        assert await asyncio.to_thread(console.num_requests, "worker-0") == 0
        await console.ask("uncordon", "worker-0")
        await all_workers_have_requests(console)
        # More restarts than failures are allowed, because an operator's restart is no failure.
        for name in ("worker-0", "worker-1", "worker-2"):
            await console.ask("restart", name, "--yes", "--wait", "--wait-s", str(DEADLINE_S))
        await all_workers_have_requests(console)
    assert (await console.ask("status"))["outcome"] == "done"
    acts = (await console.ask("audit"))["rows"]
    assert [row["verb"] for row in acts] == ["drain", "uncordon", "restart", "restart", "restart"]
    assert {row["outcome"] for row in acts} == {"done"}


def test_requests_are_shown_moved_and_cancelled(tmp_path: Path) -> None:
    """A running request is listed, moves where the operator says, and ends with an error that tells its client."""
    runtime_dir = make_runtime_folder()
    config = CONFIG.format(runtime_dir=runtime_dir)
    with running(tmp_path, config) as server:
        console = Console(runtime_dir)
        server.wait_workers(3)
        asyncio.run(_move_and_cancel(server, console))


async def _move_and_cancel(server: Server, console: Console) -> None:
    def running_request() -> dict[str, Any]:
        rows: list[dict[str, Any]] = [row for row in console.rows("requests") if row["state"] == "running"]
        return rows[0] if rows and rows[0]["output_tokens"] else {}

    async def begun() -> tuple[asyncio.Task[list[str]], dict[str, Any]]:
        """The lines of a new request's answer, and its row in the console."""
        reading = asyncio.create_task(_lines(server))
        await asyncio.to_thread(wait_until, lambda: bool(running_request()), "a running request", DEADLINE_S)
        return reading, await asyncio.to_thread(running_request)

    async def way(name: str) -> list[str]:
        known = ("came", "placed", "first token", "migrated", "ended")
        return [row["event"] for row in (await console.ask("show", name))["rows"] if row["event"] in known]

    reading, found = await begun()
    name = found["request"]
    there = next(worker for worker in ("worker-0", "worker-1") if worker != found["worker"])
    await asyncio.to_thread(console.act, "migrate", name, there)  # quickly, because requests do not last long
    await asyncio.to_thread(wait_until, lambda: running_request().get("worker") == there, "the move", DEADLINE_S)
    await asyncio.to_thread(console.act, "priority", name, "7")
    assert (await asyncio.to_thread(running_request))["priority"] == 7
    await reading
    assert await way(name) == ["came", "placed", "first token", "migrated", "ended"]
    reading, found = await begun()  # another one, because the first may end before so many commands do
    name = found["request"]
    await console.ask("cancel", name, code=1)  # it asks first, and there is no terminal
    await console.ask("cancel", name, "--yes", "--id", "once")
    assert any('"cancelled"' in line for line in await reading)
    await console.ask("cancel", name, "--yes", "--id", "once")  # the same answer again
    assert await way(name) == ["came", "placed", "first token", "ended"]


async def _lines(server: Server) -> list[str]:
    """The lines of the answer to a long request."""
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=DEADLINE_S) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, (await response.aread()).decode()
        return [line async for line in response.aiter_lines()]


def test_a_coordinator_that_dies_knows_cordons_and_acts_again(tmp_path: Path) -> None:
    """No answer is exit code 3; after the restart the worker is still cordoned, and a repeated id acts only once."""
    runtime_dir = make_runtime_folder()
    with running(tmp_path, CONFIG.format(runtime_dir=runtime_dir)) as server:
        console = Console(runtime_dir)
        server.wait_workers(3)
        console("cordon", "worker-1", "--id", "cordon")
        server.signal("coordinator", signal.SIGSTOP)
        console_command = ("--timeout", "0.3", "uncordon", "worker-1", "--id", "uncordon")
        console(*console_command, code=3)
        server.signal("coordinator", signal.SIGKILL)
        wait_until(lambda: _states(console) == {"worker-0": "open", "worker-1": "cordoned", "worker-2": "open"}, "all")
        assert console("cordon", "worker-1", "--id", "cordon")["outcome"] == "done"
        assert len(console("audit")["rows"]) == 1
        console("uncordon", "worker-1", "--id", "uncordon")
        console("uncordon", "worker-1", "--id", "uncordon")
        wait_until(lambda: _states(console)["worker-1"] == "open", "worker-1 to be open")
        assert [row["verb"] for row in console("audit")["rows"]] == ["cordon", "uncordon"]


def _states(console: Console) -> dict[str, str]:
    """The states of the workers; empty while no coordinator answers."""
    try:
        return console.states()
    except AssertionError:
        return {}
