"""The official SDK against a real server with the default model."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
)

from actorserve.model_files.describe import describe
from actorserve.model_files.tokenizer import load_tokenizer
from tests.e2e.server import Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("sdk"), "[cluster]\n[workers]\ncount = 1\n") as server:
        yield server


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


async def test_chat_is_the_same_streamed_and_whole(server: Server) -> None:
    """A greedy chat gives the same sensible text streamed and not, with equal usage."""
    async with client_of(server) as client:
        whole = await client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=0, max_tokens=30
        )
        stream = await client.chat.completions.create(
            model=server.model,
            messages=QUESTION,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage, finish_reasons = "", None, []
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reasons += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage or usage
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert finish_reasons == [whole.choices[0].finish_reason] == ["stop"]
    assert usage is not None
    assert whole.usage is not None
    # Usage is equal except for cached tokens: the second time the prompt was cached.
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


async def test_token_ids_and_text_are_the_same_prompt(server: Server, default_model_path: Path) -> None:
    """A completion of a text equals that of its token ids; a seed repeats it, and another changes it."""
    prompt = "The three most important things in life are"
    token_ids = load_tokenizer(describe(default_model_path)).encode(prompt)
    async with client_of(server) as client:

        async def complete(prompt: str | list[int], seed: int) -> str:
            answer = await client.completions.create(
                model=server.model, prompt=prompt, temperature=0.9, seed=seed, max_tokens=24
            )
            return answer.choices[0].text

        first, same, as_ids, other = await asyncio.gather(
            complete(prompt, 1), complete(prompt, 1), complete(token_ids, 1), complete(prompt, 2)
        )
    assert first == same == as_ids
    assert first != other


async def test_choices_differ_and_each_repeats(server: Server) -> None:
    """The n choices of a request have different seeds, so they differ, and the same seed repeats them."""
    async with client_of(server) as client:
        answers = [
            await client.chat.completions.create(
                model=server.model, messages=QUESTION, n=3, seed=7, temperature=1.5, max_tokens=12
            )
            for _ in range(2)
        ]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


async def test_stop_string_ends_the_answer_before_itself(server: Server) -> None:
    """The text ends right before the stop string, which may span tokens."""
    async with client_of(server) as client:
        whole = await client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=0, max_tokens=30
        )
        text = whole.choices[0].message.content or ""
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        answer = await client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=0, max_tokens=30, stop=[stop]
        )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_errors_reach_the_sdk_in_its_own_shape(server: Server) -> None:
    """A wrong request raises the SDK's own exception, which names the wrong field."""
    async with client_of(server) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model=server.model, messages=QUESTION, temperature=9)
        assert caught.value.status_code == 400
        assert caught.value.body["param"] == "temperature"  # type: ignore[index]
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model="nobody", messages=QUESTION)
        assert caught.value.status_code == 404


async def test_an_agent_turn(server: Server) -> None:
    """A demanded call has a function of the request and arguments of its schema, and its result can go back."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    weather: ChatCompletionFunctionToolParam = {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city", "parameters": schema},
    }
    async with client_of(server) as client:
        asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How will the weather in Rome be?"}]
        whole = await client.chat.completions.create(
            model=server.model,
            messages=asked,
            tools=[weather],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        )
        (call,) = whole.choices[0].message.tool_calls or []
        assert whole.choices[0].finish_reason == "tool_calls"
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"city", "days"}
        assert isinstance(arguments["days"], int)
        said: Any = whole.choices[0].message
        result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        answer = await client.chat.completions.create(
            model=server.model, messages=[*asked, said, result], tools=[weather], tool_choice="none", max_tokens=10
        )
    assert answer.choices[0].message.content
