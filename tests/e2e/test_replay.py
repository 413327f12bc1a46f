"""The journals of a real run with swaps and a killed worker are replayed: every core gives the same effects again."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from actorserve.core.cluster.state import ClusterState
from actorserve.core.gateway.state import GatewayState
from actorserve.core.instance.state import InstanceState
from tests.e2e.server import Server, replayed, running, wait_until
from tools.simulation.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CONFIG = """
[cluster]
[workers]
count = 2
engine = "fake"
host_kv_bytes = 131072
[supervision]
max_restarts = 1000
max_backoff_s = 0.2
"""
NUM_STREAMS = 12
MAX_TOKENS = 2000  # three such requests fill a fake engine's pool


async def answers(server: Server) -> list[str]:
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(number: int) -> str:
            body = {"model": server.model, "prompt": [number + 1] * 40, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            answer = await client.post(f"{server.url}/v1/completions", json=body | {"seed": number})
            return str(answer.json()["choices"][0]["text"])

        return await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))


async def answers_with_a_kill(server: Server) -> list[str]:
    asking = asyncio.create_task(answers(server))
    await asyncio.to_thread(wait_until, lambda: server.metric("actorserve_swapped_bytes_total") > 0, "swaps")
    server.signal("worker-0", signal.SIGKILL)
    return await asking


def test_logs_of_a_real_run_replay(
    tmp_path: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With too little memory and a killed worker the answers stay the same, and each journal replays equally."""
    with running(tmp_path, CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        undisturbed = asyncio.run(answers(server))
        assert asyncio.run(answers_with_a_kill(server)) == undisturbed
        server.wait_workers(2)
    results = {journal: replayed(journal) for journal in sorted(server.journals.glob("*.journal"))}
    cores = [result.core for result in results.values()]
    assert sum(isinstance(core, InstanceState) for core in cores) == 3  # two workers, and a second life
    assert sum(isinstance(core, ClusterState) for core in cores) == 1
    assert sum(isinstance(core, GatewayState) for core in cores) == 1
    assert all(result.num_compared >= result.num_entries - 1 > 10 for result in results.values())
    assert sum(core.memory.num_swap_outs for core in cores if isinstance(core, InstanceState)) > 0
    for journal in results:
        assert main(["--replay", str(journal)]) == 0
    assert capsys.readouterr().out.count("equal effects") == len(results)
