"""Clients that request the same answers again and again, compare every token, and note when each one came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tools.benchmarks.common.errors import BenchError

_TIMEOUT_S = 120.0
_PROMPT = (
    "Letter number {number}. Dear reader, the town lay between two rivers, and on its market people sold apples, "
    "lamps and stories. Continue the letter, and tell what the traveller found there:"
)


@dataclass(slots=True)
class Seen:
    """What the clients have seen so far. A gap lies between two events of a stream: (begin, end) in seconds."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    num_different: int = 0


class Streams:
    """``num_streams`` at any time, each with an answer of ``max_tokens`` of its own, from the server at ``url``."""

    def __init__(self, url: str, num_streams: int, max_tokens: int) -> None:
        self.seen = Seen()
        self._url = url
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._model = ""
        self._expected: list[list[int]] = []
        self._is_over = False

    async def learn(self) -> None:
        """Learn all answers while nothing is restarted. Raises: BenchError."""
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False) as client:
            self._model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            for _ in range(2):  # the second time shows that answers repeat
                answers = await asyncio.gather(*(self._ask(client, number) for number in range(self._num_streams)))
                if self._expected and answers != self._expected:
                    raise BenchError("the same request gave another answer, although nothing was restarted")
                self._expected = list(answers)
        self.seen = Seen()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the streams running meanwhile; at the end, the answers in flight are read."""
        self._is_over = False
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._num_streams):
                group.create_task(self._repeat(client, number))
            try:
                yield
            finally:
                self._is_over = True

    async def _repeat(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._is_over:
            try:
                token_ids = await self._ask(client, number)
            except (httpx.HTTPError, BenchError) as error:
                self.seen.failures.append(f"stream {number}: {error or type(error).__name__}")
                continue
            self.seen.num_answers += 1
            self.seen.num_different += token_ids != self._expected[number]

    async def _ask(self, client: httpx.AsyncClient, number: int) -> list[int]:
        body = {
            "model": self._model,
            "prompt": _PROMPT.format(number=number),
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": number,
            "return_token_ids": True,
            "stream": True,
        }
        token_ids: list[int] = []
        last_s: float | None = None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise BenchError(f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    raise BenchError(f"error in stream: {line[:200]}")
                now_s = time.monotonic()
                for choice in event["choices"]:
                    token_ids += choice.get("token_ids") or ()
                if last_s is not None:
                    self.seen.gaps.append((last_s, now_s))
                last_s = now_s
        if len(token_ids) != self._max_tokens:
            raise BenchError(f"the stream ended after {len(token_ids)} tokens")
        return token_ids
