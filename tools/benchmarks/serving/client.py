"""One request to a server, measured as its tokens arrive."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.serving.statistics import Outcome

_DONE = "[DONE]"


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that the server offers.

    Raises: BenchError, if no such server answers.
    """
    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise BenchError(f"{client.base_url} answers /v1/models with status {error.response.status_code}") from None
    except httpx.HTTPError as error:
        raise BenchError(
            f"no server answers at {client.base_url} ({type(error).__name__}); start tools/serve"
        ) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"{client.base_url} does not list its models as OpenAI's API does") from None


async def events(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The data of each server-sent event, without comments and other fields."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def has_output(event: dict[str, Any]) -> bool:
    """Whether a chunk carries a part of the answer, and not only the opening role or the usage."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta")
        if choice.get("text") or (delta is not None and delta.get("content")):
            return True
    return False


async def measure(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], clock: Callable[[], float] = time.perf_counter
) -> Outcome:
    """Send a streaming request, and record when its output arrives. The outcome records a failure; none is raised."""
    outcome = Outcome(sent_s=clock())
    await measure_into(outcome, client, path, body, clock)
    return outcome


async def measure_into(
    outcome: Outcome,
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Like ``measure``, but the caller may read the outcome while the request runs."""
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                outcome.error = f"status {answer.status_code}"
                return
            outcome.error = await _read(outcome, answer, clock)
    except httpx.TimeoutException:
        outcome.error = "timeout"
    except httpx.ConnectError:
        outcome.error = "no connection"
    except httpx.HTTPError:
        outcome.error = "connection lost"
    except asyncio.CancelledError:
        if outcome.ended_s is None:
            outcome.error = None  # the measurement was stopped, so the request neither ended nor failed
        raise


async def _read(outcome: Outcome, answer: httpx.Response, clock: Callable[[], float]) -> str | None:
    """Follow one stream to its end. Returns its error, or None."""
    async for data in events(answer.aiter_lines()):
        now_s = clock()
        if data == _DONE:
            outcome.output_tokens = outcome.output_tokens or len(outcome.chunk_times_s)
            outcome.ended_s = now_s
            return None
        try:
            event = json.loads(data)
            if "error" in event:
                return f"error in stream: {str(event['error'].get('message', ''))[:80]}"
            if has_output(event):
                outcome.chunk_times_s.append(now_s)
            usage = event.get("usage")
            if usage:
                outcome.prompt_tokens = int(usage["prompt_tokens"])
                outcome.output_tokens = int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return "malformed event"
    return "stream cut"
