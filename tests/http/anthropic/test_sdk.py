"""``/v1/messages`` as Anthropic's SDK uses it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RefusalReason
from actorserve.settings import HttpSettings
from tests.http.agents import AGENT_CONTEXT_TOKENS, CITY, agent_service, call, prompt_of, sdk_client, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService, delivered, end, one_by_one, refuses

TOOLS: Any = [{"name": "weather", "description": "tells the weather", "input_schema": CITY}]
QUESTION: Any = [{"role": "user", "content": "weather?"}]


@asynccontextmanager
async def sdk(service: ScriptedService, settings: HttpSettings | None = None) -> AsyncIterator[AsyncAnthropic]:
    async with sdk_client(service, settings) as http_client:
        yield AsyncAnthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=http_client)


async def test_a_text_is_answered() -> None:
    """A plain call gives a block of text, why it ended, and the usage."""
    service = thinks_and_calls("hello")
    async with sdk(service) as client:
        message = await client.messages.create(model=MODEL, max_tokens=9, system="be kind", messages=QUESTION)
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "hello"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 1
    assert message.usage.input_tokens == len(service.specs[0].prompt_token_ids)
    assert prompt_of(service) == "<|system|>be kind<|end|><|user|>weather?<|end|><|assistant|>"


async def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    """Thoughts, text and calls each become a block, and the answer ends because a tool is to be used."""
    answer = "<think>rain?</think>I look." + call("weather", city="Oslo")
    async with sdk(thinks_and_calls(answer)) as client:
        message = await client.messages.create(model=MODEL, max_tokens=99, messages=QUESTION, tools=TOOLS)
    thinking, text, tool = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "rain?"
    assert text.type == "text"
    assert text.text == "I look."
    assert tool.type == "tool_use"
    assert (tool.name, tool.input) == ("weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"


async def test_a_stream_ends_in_the_same_message() -> None:
    """The SDK's accumulated stream is the answer that is not streamed, except for ids."""
    answer = "<think>rain?</think>I look." + call("weather", city="Oslo") + call("weather", city="Bergen")
    async with sdk(thinks_and_calls(answer)) as client:
        whole = await client.messages.create(model=MODEL, max_tokens=999, messages=QUESTION, tools=TOOLS)
        async with client.messages.stream(model=MODEL, max_tokens=999, messages=QUESTION, tools=TOOLS) as stream:
            final = await stream.get_final_message()

    def lasting(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: lasting(item) for key, item in value.items() if key != "id" and item is not None}
        return [lasting(item) for item in value] if isinstance(value, list) else value

    assert lasting(final.model_dump()) == lasting(whole.model_dump())


async def test_the_events_of_a_block_are_nested() -> None:
    """Every block is started, grows and is stopped before the next block begins."""
    answer = "<think>so</think>one" + call("weather", city="Oslo")
    async with sdk(thinks_and_calls(answer)) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=999, messages=QUESTION, tools=TOOLS, stream=True)
        events = [event async for event in stream]
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
    without_repeats = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    block = ("content_block_start", "content_block_stop")
    assert without_repeats == [
        "message_start",
        *(block[0], "thinking_delta", "signature_delta", block[1]),
        *(block[0], "text_delta", block[1]),
        *(block[0], "input_json_delta", block[1]),
        *("message_delta", "message_stop"),
    ]


async def test_the_first_event_comes_before_the_tokens() -> None:
    """The start of a message counts the prompt's tokens, and none of the answer's."""
    async with sdk(thinks_and_calls("hello")) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=99, messages=QUESTION, stream=True)
        (start,) = [event.message async for event in stream if event.type == "message_start"]
    assert start.usage.input_tokens > 0
    assert start.usage.output_tokens == 0


async def test_what_the_sdk_does_in_a_loop() -> None:
    """An agent's second request repeats the answer as it came, and adds the result of the call."""
    service = thinks_and_calls("<think>rain?</think>I look." + call("weather", city="Oslo"))
    async with sdk(service) as client:
        first = await client.messages.create(model=MODEL, max_tokens=999, messages=QUESTION, tools=TOOLS)
        result: Any = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "rain"}  # type: ignore[union-attr]
        messages = [*QUESTION, first.to_param(), {"role": "user", "content": [result]}]
        await client.messages.create(model=MODEL, max_tokens=999, messages=messages, tools=TOOLS)
    assert prompt_of(service) == (
        "<|tool|>weather<|user|>weather?<|end|><|assistant|><think>rain?</think>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
        "<|tool|>rain<|end|><|assistant|>"
    )


async def test_the_stop_sequence_is_named() -> None:
    """An answer that a stop sequence ended tells which one."""
    async with sdk(thinks_and_calls("hello you")) as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=99, messages=QUESTION, stop_sequences=["never", " y"]
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " y")
    assert message.content[0].text == "hello"  # type: ignore[union-attr]


async def test_the_limit_that_ended_an_answer_is_told() -> None:
    """The client's own limit and the end of the context are different reasons."""
    async with sdk(thinks_and_calls("hello", FinishReason.LENGTH)) as client:
        own = await client.messages.create(model=MODEL, max_tokens=1, messages=QUESTION)
        context = await client.messages.create(model=MODEL, max_tokens=AGENT_CONTEXT_TOKENS, messages=QUESTION)
    assert own.stop_reason == "max_tokens"
    assert context.stop_reason == "model_context_window_exceeded"


async def test_a_beginning_of_the_answer_is_continued() -> None:
    """A last message of the assistant is the beginning of the answer."""
    service = thinks_and_calls("hello")
    async with sdk(service) as client:
        beginning: Any = {"role": "assistant", "content": "Well,"}
        await client.messages.create(model=MODEL, max_tokens=9, messages=[*QUESTION, beginning])
    assert prompt_of(service).startswith("<|user|>weather?<|end|><|assistant|>Well,")


async def test_tokens_of_a_prompt_are_counted() -> None:
    """``count_tokens`` tells the length of the prompt that a message would have, and makes no request."""
    service = thinks_and_calls("hello")
    async with sdk(service) as client:
        count = await client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS, system="be kind")
        assert service.specs == []
        await client.messages.create(model=MODEL, max_tokens=9, messages=QUESTION, tools=TOOLS, system="be kind")
    assert count.input_tokens == len(service.specs[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    [
        (RefusalReason.OVERLOADED, anthropic.RateLimitError, 429),
        (RefusalReason.NO_INSTANCE, anthropic.InternalServerError, 529),
        (RefusalReason.TOO_LARGE, anthropic.BadRequestError, 400),
    ],
)
async def test_refusals_are_the_sdks_errors(
    reason: RefusalReason, error: type[anthropic.APIStatusError], status: int
) -> None:
    """A refusal before the first event is an HTTP error, also for a stream."""
    async with sdk(refuses(reason)) as client:
        for stream in (False, True):
            with pytest.raises(error) as raised:
                await client.messages.create(model=MODEL, max_tokens=9, messages=QUESTION, stream=stream)
            assert raised.value.status_code == status
            assert raised.value.request_id


async def test_a_failure_in_a_stream_is_the_sdks_error() -> None:
    """A failure after the first event ends the stream with an error."""
    script = one_by_one("hello and hello", FinishReason.ERROR)
    async with sdk(agent_service(lambda _: script)) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=99, messages=QUESTION, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="grammar of the answer"):
            _ = [event async for event in stream]


async def test_tokens_from_the_cache_are_counted_apart() -> None:
    """The prompt's tokens are the sum of those read from the cache and the others, as in Anthropic's API."""
    script: list[Deliver | End] = [
        Deliver("", delivered("hello").token_ids, num_cached_tokens=4),
        end(FinishReason.STOP),
    ]
    service = agent_service(lambda _: script)
    async with sdk(service) as client:
        message = await client.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.input_tokens + 4 == len(service.specs[0].prompt_token_ids)
