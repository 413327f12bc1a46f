"""``/v1/responses`` as OpenAI's SDK uses it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.settings import HttpSettings
from tests.http.agents import CITY, agent_service, call, prompt_of, sdk_client, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService, delivered, end, one_by_one, refuses

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]


@asynccontextmanager
async def sdk(service: ScriptedService, settings: HttpSettings | None = None) -> AsyncIterator[AsyncOpenAI]:
    async with sdk_client(service, settings) as http_client:
        yield AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http_client)


async def test_a_text_is_answered() -> None:
    """A plain call gives the text, the usage, and says that nothing was stored."""
    service = thinks_and_calls("hello")
    async with sdk(service) as client:
        response = await client.responses.create(model=MODEL, input="hi", instructions="be kind")
    assert response.output_text == "hello"
    assert response.status == "completed"
    assert response.instructions == "be kind"
    assert response.model_extra is not None
    assert response.model_extra["store"] is False
    assert response.usage is not None
    assert response.usage.output_tokens == 1
    assert prompt_of(service) == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"


async def test_thoughts_and_calls_are_items_of_their_own() -> None:
    """Thoughts, text and calls each become an item, and the tokens of the thoughts are counted."""
    answer = "<think>rain?</think>I look." + call("weather", city="Oslo")
    async with sdk(thinks_and_calls(answer)) as client:
        response = await client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    reasoning, message, function = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["rain?"]
    assert message.type == "message"
    assert response.output_text == "I look."
    assert function.type == "function_call"
    assert (function.name, function.arguments) == ("weather", '{"city": "Oslo"}')
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_a_stream_ends_in_the_same_response() -> None:
    """The SDK's accumulated stream is the answer that is not streamed, except for ids and times."""
    answer = "<think>rain?</think>I look." + call("weather", city="Oslo") + call("weather", city="Bergen")
    async with sdk(thinks_and_calls(answer)) as client:
        whole = await client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
        async with client.responses.stream(model=MODEL, input="weather?", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    changing = {"id", "call_id", "created_at", "completed_at", "parsed_arguments", "parsed"}

    def lasting(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lasting(item) for key, item in value.items() if key not in changing}
        return [lasting(item) for item in value] if isinstance(value, list) else value

    assert lasting(final.model_dump(mode="json")) == lasting(whole.model_dump(mode="json"))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"


async def test_the_events_of_an_item_are_nested() -> None:
    """Every item is added, grows and is done before the next item begins, and deltas add up to what is done."""
    answer = "<think>so</think>one" + call("weather", city="Oslo")
    async with sdk(thinks_and_calls(answer)) as client:
        stream = await client.responses.create(model=MODEL, input="?", tools=TOOLS, stream=True)
        events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events[2:-1]]
    without_repeats = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert without_repeats == [
        *("output_item.added", *(kind.format("reasoning_text") for kind in part), "output_item.done"),
        *("output_item.added", *(kind.format("output_text") for kind in part), "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
    ]
    for name in ("reasoning_text", "output_text"):
        text = "".join(event.delta for event in events if event.type == f"response.{name}.delta")  # type: ignore[union-attr,misc]
        assert [event.text for event in events if event.type == f"response.{name}.done"] == [text]  # type: ignore[union-attr]


async def test_what_the_sdk_does_in_a_loop() -> None:
    """An agent's second request repeats the output as it came, and adds the result of the call."""
    service = thinks_and_calls("<think>rain?</think>I look." + call("weather", city="Oslo"))
    async with sdk(service) as client:
        question: Any = {"role": "user", "content": "weather?"}
        first = await client.responses.create(model=MODEL, input=[question], tools=TOOLS)
        result: Any = {"type": "function_call_output", "call_id": "call", "output": "rain"}
        await client.responses.create(model=MODEL, input=[question, *first.output, result], tools=TOOLS)  # type: ignore[list-item]
    assert prompt_of(service) == (
        "<|tool|>weather<|user|>weather?<|end|><|assistant|><think>rain?</think>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
        "<|tool|>rain<|end|><|assistant|>"
    )


async def test_parse_fills_a_model() -> None:
    """The SDK's ``parse`` sends a schema and gets an object."""

    class Answer(BaseModel):
        city: str

    async with sdk(thinks_and_calls('{"city": "Oslo"}')) as client:
        response = await client.responses.parse(model=MODEL, input="?", text_format=Answer)
    assert response.output_parsed == Answer(city="Oslo")


async def test_an_answer_that_is_cut_off_says_so() -> None:
    """An answer that reached its limit is incomplete, and so is its last item."""
    async with sdk(thinks_and_calls("hello", FinishReason.LENGTH)) as client:
        response = await client.responses.create(model=MODEL, input="?", max_output_tokens=1)
        stream = await client.responses.create(model=MODEL, input="?", max_output_tokens=1, stream=True)
        events = [event async for event in stream]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert events[-1].type == "response.incomplete"


async def test_log_probabilities_come_with_the_text() -> None:
    """Asked for, log-probabilities stand at the text's deltas and at the whole text, but not at thoughts."""
    script: list[Deliver | End] = [
        delivered("<think>so</think>", -1.0),
        delivered("hello", -0.5),
        end(FinishReason.STOP),
    ]
    async with sdk(agent_service(lambda _: script)) as client:
        include: Any = ["message.output_text.logprobs"]
        response = await client.responses.create(model=MODEL, input="?", include=include, top_logprobs=2)
        stream = await client.responses.create(model=MODEL, input="?", include=include, top_logprobs=2, stream=True)
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    part = response.output[-1].content[0]  # type: ignore[union-attr,index]
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == [("hello", -0.5)]  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr,index]
    assert [entry.token for event in deltas for entry in event.logprobs] == ["hello"]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (RefusalReason.OVERLOADED, openai.RateLimitError),
        (RefusalReason.NO_INSTANCE, openai.InternalServerError),
        (RefusalReason.TOO_LARGE, openai.BadRequestError),
    ],
)
async def test_refusals_are_the_sdks_errors(reason: RefusalReason, error: type[Exception]) -> None:
    """A refusal before the first event is an HTTP error, also for a stream."""
    async with sdk(refuses(reason)) as client:
        for stream in (False, True):
            with pytest.raises(error):
                await client.responses.create(model=MODEL, input="?", stream=stream)


async def test_a_failure_in_a_stream_is_told() -> None:
    """A failure after the first event comes as ``error`` and ``response.failed``, with the text so far."""
    script = one_by_one("hello and hello", FinishReason.ERROR)
    async with sdk(agent_service(lambda _: script)) as client:
        stream = await client.responses.create(model=MODEL, input="?", stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response  # type: ignore[union-attr]
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert failed.output_text
    assert "hello and hello".startswith(failed.output_text)
