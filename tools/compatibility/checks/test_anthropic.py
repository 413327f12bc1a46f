"""Anthropic's Python SDK."""

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string", "enum": ["San Francisco", "Paris"]}},
        "required": ["location"],
    },
}

GREEDY: Any = {"temperature": 0}
"""The SDK has no argument for the temperature, because newer models of Anthropic have none."""


@pytest.fixture
def client(url: str, key: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0)


def ask() -> list[Any]:
    return [{"role": "user", "content": "What is the weather like in Paris?"}]


def test_message(client: Anthropic, model: str) -> None:
    """A message is answered with a text block and usage."""
    message = client.messages.create(
        model=model, max_tokens=20, extra_body=GREEDY, system="Answer briefly.", messages=ask()
    )
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0
    assert 0 < message.usage.output_tokens <= 20


def test_streamed_message(client: Anthropic, model: str) -> None:
    """The stream helper gives text, and the same text in the final message."""
    with client.messages.stream(model=model, max_tokens=20, extra_body=GREEDY, messages=ask()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.usage.output_tokens > 0


def test_events_of_a_stream(client: Anthropic, model: str) -> None:
    """A stream's events come in Anthropic's order."""
    stream = client.messages.create(model=model, max_tokens=5, extra_body=GREEDY, messages=ask(), stream=True)
    kinds: list[str] = [event.type for event in stream]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools_in_a_loop(client: Anthropic, model: str) -> None:
    """A forced call has valid input, and the conversation goes on with the tool's result."""
    messages = ask()
    message = client.messages.create(
        model=model,
        max_tokens=200,
        extra_body=GREEDY,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert message.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": message.content})
    used = [block for block in message.content if block.type == "tool_use"]
    assert [block.input["location"] in ("San Francisco", "Paris") for block in used] == [True]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "15 degrees"} for block in used]
    messages.append({"role": "user", "content": results})
    message = client.messages.create(
        model=model, max_tokens=20, extra_body=GREEDY, messages=messages, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert message.content[0].type == "text"


def test_streamed_tools(client: Anthropic, model: str) -> None:
    """A streamed call's input is put together from its deltas."""
    with client.messages.stream(
        model=model,
        max_tokens=200,
        extra_body=GREEDY,
        messages=ask(),
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content[-1].type == "tool_use"
    assert final.content[-1].input["location"] in ("San Francisco", "Paris")


def test_cache_control(client: Anthropic, model: str) -> None:
    """Cache marks, which agents put on prompts and tools, are accepted."""
    marked: Any = {"type": "ephemeral"}
    message = client.messages.create(
        model=model,
        max_tokens=5,
        extra_body=GREEDY,
        system=[{"type": "text", "text": "Answer briefly.", "cache_control": marked}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": marked}]}],
        tools=[WEATHER | {"cache_control": marked}],
        tool_choice={"type": "none"},
        metadata={"user_id": "ann"},
    )
    assert message.content


def test_count_tokens(client: Anthropic, model: str) -> None:
    """The count of a prompt's tokens is the one that the answer's usage tells."""
    count = client.messages.count_tokens(model=model, system="Answer briefly.", messages=ask())
    message = client.messages.create(model=model, max_tokens=1, system="Answer briefly.", messages=ask())
    cached = message.usage.cache_read_input_tokens or 0
    assert count.input_tokens == message.usage.input_tokens + cached


async def test_asynchronous_client(url: str, key: str, model: str) -> None:
    """The asynchronous client works, too."""
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        assert (await client.messages.create(model=model, max_tokens=5, extra_body=GREEDY, messages=ask())).content


def test_errors(client: Anthropic, url: str, model: str) -> None:
    """Errors are the SDK's own classes, with Anthropic's body."""
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", max_tokens=5, messages=ask())
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model=model, max_tokens=-1, messages=ask())
    assert isinstance(error.value.body, dict)
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
            model=model, max_tokens=5, messages=ask()
        )
