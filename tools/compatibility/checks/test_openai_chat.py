"""OpenAI's Python SDK: chats, tools and structured output.

Checks are greedy, and look only at what the protocol or a grammar forces, so that they hold on every CPU. A small model
ends what a grammar closes: one call, or fields of few values. So these answers have room to end.
"""

import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current temperature of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Bogotá"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Event(BaseModel):
    """What the structured answers hold."""

    kind: Literal["fair", "concert"]
    is_public: bool


@pytest.fixture
def client(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def ask(text: str = "What is the weather like in Paris?") -> list[Any]:
    return [{"role": "developer", "content": "Answer briefly."}, {"role": "user", "content": text}]


def test_chat(client: OpenAI, model: str) -> None:
    """A chat is answered with text and usage."""
    completion = client.chat.completions.create(model=model, messages=ask(), max_completion_tokens=20, temperature=0)
    assert completion.choices[0].message.content
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_streamed_chat(client: OpenAI, model: str) -> None:
    """A streamed chat gives text, one reason to finish, and usage at the end."""
    stream = client.chat.completions.create(
        model=model,
        messages=ask(),
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_stream_helper(client: OpenAI, model: str) -> None:
    """The SDK's stream helper puts the chunks together to a message."""
    with client.chat.completions.stream(model=model, messages=ask(), stop=".", max_tokens=20, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta"} <= kinds
    assert final.choices[0].message.content


def test_an_answer_is_sent_back(client: OpenAI, model: str) -> None:
    """The server takes back the message that it answered with, as the SDK's documentation shows."""
    messages = ask()
    response = client.chat.completions.create(model=model, messages=messages, max_tokens=10, temperature=0)
    messages.append(response.choices[0].message)
    messages.append({"role": "user", "content": "Say more."})
    response = client.chat.completions.create(model=model, messages=messages, max_tokens=10, temperature=0)
    assert response.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_tools_in_a_loop(client: OpenAI, model: str, choice: Any) -> None:
    """A forced call has valid arguments, and the conversation goes on with the tool's result."""
    messages = ask()
    message = (
        client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            temperature=0,
        )
        .choices[0]
        .message
    )
    assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Bogotá")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 °C"})
    final = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], max_tokens=20, temperature=0
    )
    assert final.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_no_call_is_made_of_an_optional_tool(client: OpenAI, model: str) -> None:
    """With ``tool_choice`` none there is text and no call."""
    message = (
        client.chat.completions.create(
            model=model, messages=ask(), tools=[WEATHER], tool_choice="none", max_tokens=20, temperature=0
        )
        .choices[0]
        .message
    )
    assert message.content
    assert not message.tool_calls


def test_streamed_tool_calls(client: OpenAI, model: str) -> None:
    """The deltas of a streamed call have its id and name once, and arguments that are valid together."""
    stream = client.chat.completions.create(
        model=model,
        messages=ask(),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        max_tokens=200,
        temperature=0,
    )
    calls: dict[int, Any] = {}
    reason = None
    for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            if delta.index not in calls:
                assert delta.id
                assert delta.function.name == "get_weather"
                calls[delta.index] = ""
            calls[delta.index] += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert calls
    assert all(json.loads(text)["city"] for text in calls.values())
    assert reason == "tool_calls"


def test_parsed_tool_calls_of_a_stream(client: OpenAI, model: str) -> None:
    """The SDK's stream helper parses a call's arguments into the tool's model."""
    with client.chat.completions.stream(
        model=model,
        messages=ask(),
        tools=[pydantic_function_tool(Event)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    ) as stream:
        kinds = {event.type for event in stream}
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Event)


def test_structured_answer(client: OpenAI, model: str) -> None:
    """``parse`` gives an instance of the class."""
    completion = client.chat.completions.parse(
        model=model,
        messages=ask("Alice and Bob are going to a science fair."),
        response_format=Event,
        max_tokens=600,
        temperature=0,
    )
    assert isinstance(completion.choices[0].message.parsed, Event)


def test_json_object(client: OpenAI, model: str) -> None:
    """The format ``json_object`` gives text that begins an object, and the whole object if it ended by itself."""
    choice = client.chat.completions.create(
        model=model,
        messages=ask("Describe a cat in JSON."),
        response_format={"type": "json_object"},
        max_tokens=100,
        temperature=0,
    ).choices[0]
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_log_probabilities(client: OpenAI, model: str) -> None:
    """Every token has its log-probability and the asked number of alternatives."""
    choice = client.chat.completions.create(
        model=model, messages=ask(), max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_several_choices(client: OpenAI, model: str) -> None:
    """With ``n`` there are so many answers."""
    completion = client.chat.completions.create(model=model, messages=ask(), n=2, max_tokens=5, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1]


def test_defaults_and_no_ops(client: OpenAI, model: str) -> None:
    """Fields that clients send with their defaults change nothing."""
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hello."}]}],
        max_tokens=5,
        temperature=0,
        store=False,
        metadata={"purpose": "check"},
        service_tier="auto",
        user="ann",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        prompt_cache_key="key",
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        stop=None,
        extra_body={"tools": None, "reasoning_effort": None, "functions": None},
    )
    assert completion.choices[0].message.content


async def test_asynchronous_client(url: str, key: str, model: str) -> None:
    """The asynchronous client works, too."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        completion = await client.chat.completions.create(model=model, messages=ask(), max_tokens=5, temperature=0)
    assert completion.choices[0].message.content


def test_unknown_model(client: OpenAI) -> None:
    """An unknown model is the SDK's NotFoundError."""
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=ask())


def test_wrong_key(url: str, model: str) -> None:
    """A wrong key is the SDK's AuthenticationError."""
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).chat.completions.create(
            model=model, messages=ask()
        )


def test_invalid_field(client: OpenAI, model: str) -> None:
    """An invalid value is a BadRequestError that names the field."""
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=ask(), temperature=-1)
    assert error.value.param == "temperature"
