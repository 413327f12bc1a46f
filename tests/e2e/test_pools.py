"""Prompt and token workers as real processes: requests change hands after their prompts, whichever process dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from actorserve.cluster.file import Host, read_cluster_file
from tests.e2e.clients import Clients
from tests.e2e.hosts import CONFIG as HOST_CONFIG, hosts_running
from tests.e2e.kv_starts import kv_starts
from tests.e2e.operator import Console
from tests.e2e.server import ROOT, Server, running, wait_until
from tests.workers.power.fake_driver import FakeDriver, build_library

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WORKERS = ["worker-0", "worker-1", "worker-2"]
CONFIG = """
[cluster]
heartbeat_s = 0.2
death_after_s = 1.5
load_report_s = 0.1
retry_s = 0.3
[workers]
count = 3
roles = ["prompt", "token", "token"]
engine = "fake"
kv_cache_bytes = 65536
max_batch_tokens = 24
max_batch_requests = 8
[supervision]
max_restarts = 1000
backoff_s = 0.1
max_backoff_s = 0.1
"""
HANDED_OVER = "actorserve_handed_over_total"
NUM_GPUS = 8  # of each host of the example


def test_requests_change_hands_after_their_prompts(tmp_path: Path, default_model_path: Path) -> None:
    """Answers are the same while a prompt or a token worker is killed, and while an operator changes roles; and token
    workers start with the KV that was copied to them.
    """
    runtime_dir = tmp_path / "run"
    config = CONFIG.replace("[cluster]", f'[cluster]\nruntime_dir = "{runtime_dir}"')
    with running(tmp_path / "server", config, "--model", str(default_model_path)) as server:
        server.wait_workers(len(WORKERS))
        asyncio.run(_disturb(server, Console(runtime_dir)))
    starts = [start for name in WORKERS[1:] for start in kv_starts(server.journal(name))]
    assert sum(start.num_computed == start.num_tokens - 1 for start in starts) >= 0.8 * len(starts) > 0


async def _disturb(server: Server, console: Console) -> None:
    clients = Clients(server, num_streams=6, max_tokens=60)
    assert {row["worker"]: row["role"] for row in console.rows("workers")} == {
        "worker-0": "prompt",
        "worker-1": "token",
        "worker-2": "token",
    }
    await clients.learn()
    async with clients.running():
        await _until_more_change_hands(server)
        for name in ("worker-1", "worker-0"):
            pid = server.pid(name)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await _until_more_change_hands(server)
        console.act("role", "worker-2", "mixed")
        await asyncio.to_thread(wait_until, partial(_has_role, console, "worker-2", "mixed"), "the role")
        console.act("role", "worker-2", "token")
        await _until_more_change_hands(server)
    assert clients.num_answers


async def _until_more_change_hands(server: Server) -> None:
    least = server.metric(HANDED_OVER) + 6
    await asyncio.to_thread(wait_until, lambda: server.metric(HANDED_OVER) >= least, "handoffs")


def _has_role(console: Console, worker: str, role: str) -> bool:
    return any(row["worker"] == worker and row["role"] == role for row in console.rows("workers"))


def test_new_workers_get_the_role_of_the_pool_that_needs_them(tmp_path: Path, default_model_path: Path) -> None:
    """Two more workers come up as mixed ones, and the more pressed pool gets them; two fewer leave one of each pool.
    Both are events, and requests go on meanwhile.
    """
    runtime_dir = tmp_path / "run"
    config = CONFIG.replace("[cluster]", f'[cluster]\nruntime_dir = "{runtime_dir}"').replace("count = 3", "count = 2")
    config = config.replace('["prompt", "token", "token"]', '["prompt", "token"]')
    config += "[scaling]\nmax_workers = 4\nmin_workers = 2\n"
    with running(tmp_path / "server", config, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        asyncio.run(_scale(server, Console(runtime_dir)))


async def _scale(server: Server, console: Console) -> None:
    clients = Clients(server, num_streams=3, max_tokens=40)
    await clients.learn()
    async with clients.running():
        for number in (4, 2):
            console.act("scale", str(number))
            await asyncio.to_thread(wait_until, partial(_has_pools, console, number), f"{number} workers", 60.0)
            await _until_more_change_hands(server)
    assert clients.num_answers
    told = " ".join(row["text"] for row in console.rows("events"))
    for pattern in ("one more worker is started for the {} pool", "it is not needed now in the {} pool, and ends"):
        assert sum(told.count(pattern.format(pool)) for pool in ("prompt", "token")) == 2


def _has_pools(console: Console, num_workers: int) -> bool:
    """Whether so many workers are up, each in a pool, and both pools have one."""
    roles = [row["role"] for row in console.rows("workers")]
    return len(roles) == num_workers and set(roles) == {"prompt", "token"}


def test_the_example_of_a_split_cluster_serves(tmp_path: Path, default_model_path: Path) -> None:
    """The two hosts of config/cluster-split.toml share requests over tcp, a chat streams through a handoff, and on both
    hosts caps are in force that keep their budgets, until the processes that set them end.
    """
    example = read_cluster_file(ROOT / "config" / "cluster-split.toml")
    shares = {host.name: _share(host) for host in example.hosts}
    config = HOST_CONFIG.format(model=default_model_path)
    drivers = {host.name: _driver(tmp_path / f"gpus-{host.name}") for host in example.hosts}
    with ExitStack() as stack:
        hosts = stack.enter_context(hosts_running(tmp_path, config, shares, program=("actorserve",)))
        for name, driver in drivers.items():
            stack.enter_context(actuator(driver, hosts.cluster_file, name))
        alpha = hosts.hosts["alpha"]
        alpha.wait_workers(3)
        console = Console(hosts.runtime_dirs["alpha"])
        assert {row["worker"]: row["role"] for row in console.rows("workers")} == {
            "alpha/worker-0": "prompt",
            "beta/worker-0": "token",
            "beta/worker-1": "token",
        }
        for host in example.hosts:
            budget_watts = host.budget_watts
            assert budget_watts is not None
            driver = drivers[host.name]
            wait_until(partial(_keeps, driver, budget_watts), f"the caps of {host.name}", 60.0)
        rows = console.rows("cap")
        assert sorted(row["host"] for row in rows) == ["alpha"] * NUM_GPUS + ["beta"] * NUM_GPUS
        assert {(row["host"], row["host_budget_watts"]) for row in rows} == {("alpha", 2800.0), ("beta", 2400.0)}
        handed_over = alpha.metric(HANDED_OVER)
        assert len(_chat(alpha)) > 1
        assert alpha.metric(HANDED_OVER) > handed_over
        asyncio.run(_serve(alpha))
    assert {driver.limit(gpu) for driver in drivers.values() for gpu in range(NUM_GPUS)} == {700.0}


def _driver(folder: Path) -> FakeDriver:
    """A driver of its own library, with more GPUs than the budgets of the example feed."""
    gpus = folder / "devices"
    gpus.mkdir(parents=True)
    return FakeDriver(build_library(folder), gpus, NUM_GPUS)


@contextmanager
def actuator(driver: FakeDriver, cluster_file: Path, host: str) -> Iterator[None]:
    """The process that sets the caps of a host. It is told to end, and must end well."""
    options = ("--host", host, "--cluster", str(cluster_file), "--state-dir", str(driver.folder.parent / "state"))
    environment = os.environ | driver.environment | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-P", "-m", "actorserve", "power", *options], env=environment)
    try:
        yield
        process.terminate()
        assert process.wait(30.0) == 0
    finally:
        process.kill()
        process.wait()


def _keeps(driver: FakeDriver, budget_watts: float) -> bool:
    """Whether the power limits keep the budget, and use it up but for a part of a watt each."""
    total = sum(driver.limit(gpu) for gpu in range(NUM_GPUS))
    return budget_watts - NUM_GPUS <= total <= budget_watts


def _chat(server: Server) -> list[str]:
    """The pieces of an answer that is streamed. Raises: AssertionError unless it comes to its end."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": server.model, "messages": messages, "stream": True, "max_tokens": 30, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60.0) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


async def _serve(server: Server) -> None:
    clients = Clients(server, num_streams=4, max_tokens=40)
    await clients.learn()
    async with clients.running():
        await _until_more_change_hands(server)


def _share(host: Host) -> str:
    roles = json.dumps(list(host.roles))
    return f"gateways = {host.gateways}\nworkers = {host.workers}\nroles = {roles}\nbudget_watts = {host.budget_watts}"
