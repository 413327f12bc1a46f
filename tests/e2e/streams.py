"""Streams of a server, checked token by token against undisturbed answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.e2e.server import Server


class Streams:
    """``num_streams`` at any time, each of which requests its own answer of ``max_tokens`` again and again."""

    def __init__(self, server: Server, num_streams: int, max_tokens: int) -> None:
        self._server = server
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._expected: dict[int, list[str]] = {}
        self._is_over = False
        self.num_answers = 0

    async def learn(self) -> None:
        """Learn all answers while nothing disturbs them."""
        async with httpx.AsyncClient(timeout=120) as client:
            answers = await asyncio.gather(*(self._ask(client, number) for number in range(self._num_streams)))
            self._expected = dict(enumerate(answers))
        assert len({tuple(answer) for answer in answers}) == self._num_streams

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the streams running meanwhile. Raises: AssertionError for a request that fails, or another token."""
        self._is_over = False
        running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._is_over = True
            await running

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
            for number in range(self._num_streams):
                group.create_task(self._repeat(client, number))

    async def _repeat(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._is_over:
            tokens = await self._ask(client, number)
            assert tokens == self._expected[number], f"stream {number}: another token, one twice, or one lost"
            self.num_answers += 1

    async def _ask(self, client: httpx.AsyncClient, number: int) -> list[str]:
        body = {
            "model": self._server.model,
            "prompt": [number + 1, *range(100, 120 + 5 * number)],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "seed": number,
            "logprobs": 1,
            "stream": True,
        }
        tokens: list[str] = []
        async with client.stream("POST", f"{self._server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "choices" in event, line
                [choice] = event["choices"]
                tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                if choice["finish_reason"] is not None:
                    assert choice["finish_reason"] == "length"
                    return tokens
        raise AssertionError(f"stream {number}: it ended without a reason after {len(tokens)} tokens")
