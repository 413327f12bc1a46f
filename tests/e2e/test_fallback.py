"""Streams that begin without a coordinator get the same tokens, and no request begins twice when it returns."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from actorserve.core.messages import Start
from actorserve.wire.journal import read_entries
from tests.e2e.server import Server, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NUM_STREAMS = 12
MAX_TOKENS = 300
CONFIG = """
[cluster]
[workers]
count = 2
engine = "fake"
[migration]
# So that every epoch is a placement.
enabled = false
[supervision]
max_restarts = 1000
# Longer than the silence that counts as death, so that the gateway notices that the coordinator was killed.
backoff_s = 4.0
max_backoff_s = 4.0
"""
PLACED_HERE = "actorserve_placed_without_coordinator_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("fallback"), CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        yield server


async def ask(server: Server, number: int) -> tuple[str, int, str | None]:
    """Stream an answer. Returns its text, its number of tokens, and why it ended."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        stream = await client.completions.create(
            model=server.model,
            prompt=[number, *range(100, 120)],
            max_tokens=MAX_TOKENS,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, num_tokens, finish_reason = "", 0, None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                finish_reason = choice.finish_reason or finish_reason
            num_tokens = chunk.usage.completion_tokens if chunk.usage is not None else num_tokens
        return text, num_tokens, finish_reason


async def ask_all(server: Server) -> list[tuple[str, int, str | None]]:
    return await asyncio.gather(*(ask(server, number) for number in range(NUM_STREAMS)))


def starts(server: Server) -> dict[str, Counter[str]]:
    """Worker -> request id -> how often the worker began the request."""
    begun: dict[str, Counter[str]] = {}
    for name in ("worker-0", "worker-1"):
        with server.journal(name).open("rb") as file:
            messages = [entry.message for entry in read_entries(file)]
        begun[name] = Counter(message.request.request_id for message in messages if isinstance(message, Start))
    return begun


def is_back(server: Server) -> bool:
    """Whether the coordinator places requests again."""
    placed_here = server.metric(PLACED_HERE)
    body = {"model": server.model, "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    return server.metric(PLACED_HERE) == placed_here


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_streams_begin_without_the_coordinator(server: Server, how: signal.Signals) -> None:
    """While the coordinator is frozen or killed, new streams are spread over the workers and get their undisturbed
    tokens, also if the coordinator returns while they run. No request begins twice.
    """
    undisturbed = asyncio.run(ask_all(server))
    assert [answer[1:] for answer in undisturbed] == [(MAX_TOKENS, "length")] * NUM_STREAMS
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0.0, "the gateway knows that all blocks are free")
    placed_here, before = server.metric(PLACED_HERE), starts(server)

    async def disturbed() -> list[tuple[str, int, str | None]]:
        pid = server.pid("coordinator")
        assert pid is not None
        os.kill(pid, how)
        answers = await ask_all(server)  # these streams wait until the coordinator's death is noticed
        assert server.metric(PLACED_HERE) == placed_here + NUM_STREAMS
        assert min((count - before[name]).total() for name, count in starts(server).items()) >= NUM_STREAMS // 4
        later = asyncio.create_task(ask_all(server))
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: server.pid("coordinator") is not None, "a coordinator")
        assert await later == answers
        return answers

    assert asyncio.run(disturbed()) == undisturbed
    wait_until(lambda: is_back(server), "the coordinator places again")
    assert asyncio.run(ask_all(server)) == undisturbed
    assert set(sum(starts(server).values(), Counter()).values()) == {1}
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0.0, "all blocks free")
