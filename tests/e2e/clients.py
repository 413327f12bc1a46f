"""Clients that stream the same answers repeatedly, and check every token."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from tests.e2e.server import Server

NUM_STREAMS = 10
MAX_TOKENS = 300


class Clients:
    """``num_streams`` streams at any time. A stream requests its own answer of ``max_tokens`` repeatedly."""

    def __init__(self, server: Server, num_streams: int = NUM_STREAMS, max_tokens: int = MAX_TOKENS) -> None:
        self._server = server
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._expected: dict[int, list[str]] = {}
        self._is_over = False
        self.leaving = False  # whether some clients hang up in the middle of their answer
        self.num_answers = 0
        self.num_left = 0

    async def learn(self) -> None:
        """Learn all answers while no request migrates and no fault happens."""
        async with httpx.AsyncClient(timeout=120) as client:
            answers = await asyncio.gather(*(self._ask(client, number) for number in range(self._num_streams)))
            for number, (tokens, reason) in enumerate(answers):
                assert (len(tokens), reason) == (self._max_tokens, "length")
                self._expected[number] = tokens
        assert len({tuple(tokens) for tokens in self._expected.values()}) == self._num_streams

    async def run(self) -> None:
        """Send requests until ``stop``. Raises: AssertionError for an answer that differs from the undisturbed one."""
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
            for number in range(self._num_streams):
                group.create_task(self._ask_again_and_again(client, number))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the streams running meanwhile, and end as ``stop`` does. Raises: AssertionError, as ``run``."""
        self._is_over = False
        running = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self.stop()
            await running

    def stop(self) -> None:
        """Send no new requests; the answers in flight still end."""
        self._is_over = True

    async def _ask_again_and_again(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._is_over:
            tokens, reason = await self._ask(client, number)
            expected = self._expected[number]
            assert tokens == expected[: len(tokens)], f"stream {number}: another token, one twice, or one lost"
            assert reason == "left" or (reason == "length" and tokens == expected), f"stream {number}: {reason}"
            self.num_answers += reason != "left"
            self.num_left += reason == "left"

    async def _ask(self, client: httpx.AsyncClient, number: int) -> tuple[list[str], str]:
        """The tokens of an answer, and why it ended."""
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
                    return tokens, choice["finish_reason"]
                if self.leaving and random.random() < 0.01:
                    return tokens, "left"
        raise AssertionError(f"stream {number}: it ended without a reason after {len(tokens)} tokens")


async def under_load(server: Server, disturb: Callable[[], None]) -> int:
    """Disturb the cluster while clients stream, and wait for their answers. Returns the number of answers."""
    clients = Clients(server)
    await clients.learn()
    async with clients.running():
        await asyncio.to_thread(disturb)
    return clients.num_answers
