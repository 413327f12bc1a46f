"""After kill -9 of a worker, another worker goes on from the checkpoints, and the tokens stay the same."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from actorserve.core.effects import RunStep
from actorserve.core.messages import Start
from actorserve.core.replay import make_core
from actorserve.wire.journal import Entry, read_entries, read_records
from actorserve.wire.recipes import parse_recipe
from tests.e2e.server import Server, instance_of, replayed, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WORKERS = ("worker-0", "worker-1")
TOKENS_PER_BLOCK = 16
NUM_PROMPT = 200
NUM_STREAMS = 4
MAX_TOKENS = {"fake": 3000, "torch": 250}
CONFIG = """
[cluster]
[model]
dtype = "int8"
[migration]
enabled = false
checkpoint_tokens = 16
[workers]
count = 2
engine = "{engine}"
tokens_per_block = 16
kv_cache_bytes = {kv_bytes}
host_kv_bytes = {kv_bytes}
# So that only checkpoints save a prompt from being computed again.
prefix_cache = false
[supervision]
max_restarts = 1000
max_backoff_s = 0.2
"""
KV_BYTES = {"fake": 16 * 20_000, "torch": 2**29}


@pytest.fixture(scope="module", params=["fake", "torch"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    config = CONFIG.format(engine=engine, kv_bytes=KV_BYTES[engine])
    with running(tmp_path_factory.mktemp("checkpoints"), config, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        yield server


async def ask(server: Server, number: int, max_tokens: int) -> list[str]:
    """The tokens of one answer. Even numbers are decoded greedily, odd ones are sampled."""
    body = {
        "model": server.model,
        "prompt": [number + 1, *range(100, 100 + NUM_PROMPT - 1)],
        "max_tokens": max_tokens,
        "temperature": float(number % 2),
        "ignore_eos": True,
        "seed": number,
        "logprobs": 1,
        "stream": True,
    }
    tokens: list[str] = []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                if choice["finish_reason"] is not None:
                    return tokens
    raise AssertionError(f"it ended without a reason after {len(tokens)} tokens")


async def ask_all(server: Server, max_tokens: int) -> list[list[str]]:
    return list(await asyncio.gather(*(ask(server, number, max_tokens) for number in range(NUM_STREAMS))))


def first_starts(journal: Path) -> dict[str, int]:
    """Request id -> the first position that the worker of this journal computed itself."""
    starts: dict[str, int] = {}
    with journal.open("rb") as file:
        records = read_records(file)
        recipe = next(records)
        assert isinstance(recipe, str)
        core = make_core(parse_recipe(recipe))
        for record in records:
            effects = core.handle(record.message, record.now, record.sender) if isinstance(record, Entry) else ()
            for effect in effects:
                if isinstance(effect, RunStep):
                    for request_id, start in zip(effect.plan.request_ids, effect.plan.starts, strict=True):
                        starts.setdefault(request_id, start)
    return starts


def adopted(journal: Path) -> list[str]:
    """The requests that the worker of this journal started from checkpoints."""
    with journal.open("rb") as file:
        messages = [entry.message for entry in read_entries(file)]
    return [start.request.request_id for start in messages if isinstance(start, Start) and start.transfer is not None]


def has_checkpoints(server: Server, victim: str) -> bool:
    """Whether the prompts of at least two of the victim's running requests are checkpointed."""
    core = instance_of(server.journal(victim))
    checkpointed = core.checkpoint_source._checkpoints.values()
    least = NUM_PROMPT - TOKENS_PER_BLOCK
    return sum(checkpoint.num_confirmed * TOKENS_PER_BLOCK >= least for checkpoint in checkpointed) >= 2


def test_a_killed_workers_requests_go_on_from_their_checkpoints(server: Server, engine: str) -> None:
    """Every client gets its undisturbed answer, and the holder of a checkpoint computes no prompt whose KV it has."""
    max_tokens = MAX_TOKENS[engine]
    undisturbed = asyncio.run(ask_all(server, max_tokens))
    assert [len(tokens) for tokens in undisturbed] == [max_tokens] * NUM_STREAMS
    victims: list[str] = []  # one worker that runs two of the requests

    def has_victim() -> bool:
        victims[:] = [name for name in WORKERS if has_checkpoints(server, name)]
        return bool(victims)

    async def disturbed() -> list[list[str]]:
        answers = asyncio.create_task(ask_all(server, max_tokens))
        await asyncio.to_thread(wait_until, has_victim, "requests with checkpoints")
        pid = server.pid(victims[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await answers

    assert asyncio.run(disturbed()) == undisturbed
    [holder] = [name for name in WORKERS if name != victims[0]]
    requests = adopted(server.journal(holder))
    assert len(requests) >= 2
    starts = first_starts(server.journal(holder))
    assert all(starts[request_id] >= NUM_PROMPT - TOKENS_PER_BLOCK for request_id in requests)
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0.0, "all blocks free")
    for name in WORKERS:
        replayed(server.journal(name))
