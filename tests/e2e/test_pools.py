"""Prompt and token workers as real processes: requests change hands after their prompts, whichever process dies."""

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from actorserve.cluster.file import Host, read_cluster_file
from tests.e2e.clients import Clients
from tests.e2e.hosts import CONFIG as HOST_CONFIG, hosts_running
from tests.e2e.kv_starts import kv_starts
from tests.e2e.operator import Console
from tests.e2e.server import ROOT, Server, running, wait_until

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


def test_the_example_of_a_split_cluster_serves(tmp_path: Path, default_model_path: Path) -> None:
    """The two hosts of config/cluster-split.toml share requests over tcp. Budgets without a process that sets caps
    change nothing.
    """
    example = read_cluster_file(ROOT / "config" / "cluster-split.toml")
    shares = {host.name: _share(host) for host in example.hosts}
    config = HOST_CONFIG.format(model=default_model_path)
    with hosts_running(tmp_path, config, shares, program=("actorserve",)) as hosts:
        alpha = hosts.hosts["alpha"]
        alpha.wait_workers(3)
        console = Console(hosts.runtime_dirs["alpha"])
        assert {row["worker"]: row["role"] for row in console.rows("workers")} == {
            "alpha/worker-0": "prompt",
            "beta/worker-0": "token",
            "beta/worker-1": "token",
        }
        asyncio.run(_serve(alpha))


async def _serve(server: Server) -> None:
    clients = Clients(server, num_streams=4, max_tokens=40)
    await clients.learn()
    async with clients.running():
        await _until_more_change_hands(server)


def _share(host: Host) -> str:
    roles = json.dumps(list(host.roles))
    return f"gateways = {host.gateways}\nworkers = {host.workers}\nroles = {roles}\nbudget_watts = {host.budget_watts}"
