"""Structured output between real processes: answers follow their grammar, also when their worker is killed."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

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
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 70},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "maxItems": 40},
        "is_last": {"type": "boolean"},
    },
    "required": ["name", "numbers", "is_last"],
    "additionalProperties": False,
}
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("structured"), CONFIG, "--model", str(default_model_path)) as server:
        server.wait_workers(2)
        yield server


async def ask(server: Server, number: int) -> str:
    """The streamed text of one answer: JSON for even numbers, a regular expression's text for odd ones."""
    wanted: dict[str, Any] = {"extra_body": {"structured_outputs": {"regex": "[a-f]{200}(yes|no)"}}}
    if number % 2 == 0:
        wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        stream = await client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": f"Number {number}, please."}],
            max_tokens=400,
            seed=number,
            stream=True,
            **wanted,
        )
        text, reason = "", None
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert reason == "stop"
        return text


async def ask_all(server: Server) -> list[str]:
    return await asyncio.gather(*(ask(server, number) for number in range(NUM_STREAMS)))


def test_answers_follow_their_grammar_through_a_kill(server: Server) -> None:
    """All answers end by themselves and follow their grammar, and a killed worker changes none of them."""
    undisturbed = asyncio.run(ask_all(server))
    for number, text in enumerate(undisturbed):
        if number % 2:
            assert re.fullmatch("[a-f]{200}(yes|no)", text)
        else:
            value = json.loads(text)
            assert set(value) == {"name", "numbers", "is_last"}
            assert 60 <= len(value["name"]) <= 70
            assert all(10 <= one <= 99 for one in value["numbers"])
    failovers = server.metric("actorserve_failovers_total")

    async def disturbed() -> list[str]:
        made = server.metric("vllm:generation_tokens_total")
        answers = asyncio.create_task(ask_all(server))
        enough = made + 10 * NUM_STREAMS
        await asyncio.to_thread(
            wait_until, lambda: server.metric("vllm:generation_tokens_total") > enough, "answers to begin"
        )
        pid = server.pid("worker-0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await answers

    assert asyncio.run(disturbed()) == undisturbed
    assert server.metric("actorserve_failovers_total") > failovers
