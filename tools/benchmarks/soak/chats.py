"""Random chats, at random times, of which a share hangs up in the middle; and what became of them."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tools.benchmarks.common.prompts import prompt_text
from tools.benchmarks.serving.client import events

_NUM_KNOWN: Final = 48  # prompts that are asked again and again, so that their answers can be compared
_PROMPT_WORDS: Final = (4, 160)
_MAX_TOKENS: Final = (1, 64)
_TIMEOUT_S: Final = 120.0
_DONE: Final = "[DONE]"
_MAX_EXAMPLES: Final = 10


@dataclass(slots=True)
class Outcomes:
    """What became of the chats. ``differing``: answers that are not the earlier one's to the same question."""

    finished: int = 0
    cancelled: int = 0
    differing: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


class Chats:
    """Asks a server at random times, ``per_s`` a second, with one connection for each chat."""

    def __init__(self, url: str, model: str, seed: int, *, per_s: float, cancelled_share: float) -> None:
        self._url = url
        self._model = model
        self._dice = random.Random(seed)
        self._per_s = per_s
        self._cancelled_share = cancelled_share
        self._known = [self._question() for _ in range(_NUM_KNOWN)]
        self._answers: dict[int, str] = {}
        self.outcomes = Outcomes()

    async def run(self, seconds: float) -> None:
        """Start chats for so long, and wait until all have ended."""
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (now_s := time.monotonic()) < until_s:
                group.create_task(self._chat(*self._next()))
                await asyncio.sleep(min(until_s - now_s, self._dice.expovariate(self._per_s)))

    def _question(self) -> dict[str, Any]:
        """A chat; half of them are greedy, and the others are drawn with a seed, so each has only one right answer."""
        dice = self._dice
        sampling = {"temperature": 0.0} if dice.random() < 0.5 else {"temperature": 1.0, "seed": dice.getrandbits(32)}
        return sampling | {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt_text(dice.randint(*_PROMPT_WORDS), dice)}],
            "max_tokens": dice.randint(*_MAX_TOKENS),
            "stream": dice.random() < 0.8,
        }

    def _next(self) -> tuple[int | None, dict[str, Any], int | None]:
        """A known question's number, the question, and after how many events its client hangs up, if it does."""
        dice = self._dice
        number = dice.randrange(_NUM_KNOWN) if dice.random() < 0.5 else None
        question = self._question() if number is None else self._known[number]
        hangs_up = dice.random() < self._cancelled_share
        return number, question, dice.randrange(question["max_tokens"]) if hangs_up else None

    async def _chat(self, number: int | None, question: dict[str, Any], cancel_after: int | None) -> None:
        try:
            async with httpx.AsyncClient(
                base_url=self._url, timeout=_TIMEOUT_S, trust_env=False, verify=False
            ) as client:
                if question["stream"]:
                    text = await self._stream(client, question, cancel_after)
                else:
                    text = await self._whole(client, question, cancel_after)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        if text is None:
            return
        self.outcomes.finished += 1
        if number is not None and self._answers.setdefault(number, text) != text:
            self.outcomes.differing += 1
            self._example(f"chat {number}: {text!r} instead of {self._answers[number]!r}")

    async def _stream(
        self, client: httpx.AsyncClient, question: dict[str, Any], cancel_after: int | None
    ) -> str | None:
        """The answer; None if the client hung up or the chat failed."""
        text, num_events = "", 0
        async with client.stream("POST", "/v1/chat/completions", json=question) as answer:
            if answer.status_code != httpx.codes.OK:
                self._fail(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
                return None
            if cancel_after == 0:
                self.outcomes.cancelled += 1
                return None
            async for data in events(answer.aiter_lines()):
                if data == _DONE:
                    return text
                event = json.loads(data)
                if "error" in event:
                    self._fail(f"in a stream: {event['error']}")
                    return None
                text += event["choices"][0]["delta"].get("content") or ""
                num_events += 1
                self.outcomes.output_tokens += 1
                if num_events == cancel_after:
                    self.outcomes.cancelled += 1
                    return None
        self._fail("a stream was cut")
        return None

    async def _whole(self, client: httpx.AsyncClient, question: dict[str, Any], cancel_after: int | None) -> str | None:
        """The answer; None if the client hung up or the chat failed."""
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=question))
        if cancel_after is not None:
            await asyncio.wait([asking], timeout=cancel_after / 40)
            asking.cancel()
            await asyncio.wait([asking])
            self.outcomes.cancelled += 1
            return None
        answer = await asking
        if answer.status_code != httpx.codes.OK:
            self._fail(f"status {answer.status_code}: {answer.content[:200]!r}")
            return None
        body = answer.json()
        self.outcomes.output_tokens += body["usage"]["completion_tokens"]
        return str(body["choices"][0]["message"]["content"])

    def _fail(self, reason: str) -> None:
        self.outcomes.errors[reason.partition(":")[0]] += 1
        self._example(reason)

    def _example(self, text: str) -> None:
        if len(self.outcomes.examples) < _MAX_EXAMPLES:
            self.outcomes.examples.append(text[:400])
