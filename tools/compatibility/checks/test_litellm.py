"""LiteLLM, through its providers for vLLM, for OpenAI-compatible servers and for Anthropic."""

import json
from typing import Any

import litellm
import pytest

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "enum": ["San Francisco", "Paris"]}},
            "required": ["location"],
        },
    },
}
PROVIDERS = ("hosted_vllm", "openai")


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest, url: str, key: str, model: str) -> dict[str, Any]:
    """The arguments that point LiteLLM to the server."""
    return {"model": f"{request.param}/{model}", "api_base": f"{url}/v1", "api_key": key}


def ask() -> list[Any]:
    return [{"role": "user", "content": "What is the weather like in Paris?"}]


def test_completion(server: dict[str, Any]) -> None:
    """A chat is answered with text and usage."""
    response = litellm.completion(**server, messages=ask(), max_tokens=20, temperature=0)
    assert response.choices[0].message.content
    assert response.usage.completion_tokens > 0


def test_stream(server: dict[str, Any]) -> None:
    """A streamed chat gives text, which LiteLLM puts together again."""
    chunks = list(litellm.completion(**server, messages=ask(), max_tokens=20, temperature=0, stream=True))
    assert litellm.stream_chunk_builder(chunks, messages=ask()).choices[0].message.content


def test_tools_in_a_loop(server: dict[str, Any]) -> None:
    """A forced call has valid arguments, and the conversation goes on with the tool's result."""
    messages = ask()
    response = litellm.completion(
        **server,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    )
    message = response.choices[0].message
    messages.append(message)
    assert message.tool_calls
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["location"] in ("San Francisco", "Paris")
        messages.append(
            {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": '{"temperature": "22"}'}
        )
    assert litellm.completion(**server, messages=messages, tools=[WEATHER], max_tokens=20, temperature=0).choices


def test_json_schema(server: dict[str, Any]) -> None:
    """A schema is kept."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["fair", "concert"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    response = litellm.completion(
        **server,
        messages=ask(),
        response_format={"type": "json_schema", "json_schema": {"name": "event", "schema": schema, "strict": True}},
        max_tokens=400,
        temperature=0,
    )
    assert json.loads(response.choices[0].message.content)["kind"] in ("fair", "concert")


def test_text_completion(url: str, key: str, model: str) -> None:
    """A prompt is continued."""
    response = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=f"{url}/v1",
        api_key=key,
        prompt="Once upon",
        max_tokens=8,
        temperature=0,
    )
    assert response.choices[0].text


def test_responses(url: str, key: str, model: str) -> None:
    """LiteLLM's ``responses`` reaches the endpoint of the same name."""
    response: Any = litellm.responses(
        model=f"openai/{model}",
        api_base=f"{url}/v1",
        api_key=key,
        input="Who wrote Faust?",
        max_output_tokens=20,
        temperature=0,
    )
    assert response.output[0].content[0].text


def test_anthropic(url: str, key: str, model: str) -> None:
    """Through its Anthropic provider, LiteLLM reaches ``/v1/messages``."""
    response = litellm.completion(
        model=f"anthropic/{model}", api_base=url, api_key=key, messages=ask(), max_tokens=20, temperature=0
    )
    assert response.choices[0].message.content


async def test_asynchronous_call(server: dict[str, Any]) -> None:
    """The asynchronous call works, too."""
    response = await litellm.acompletion(**server, messages=ask(), max_tokens=5, temperature=0)
    assert response.choices[0].message.content


def test_unknown_model(url: str, key: str) -> None:
    """An unknown model is LiteLLM's NotFoundError."""
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(
            model="hosted_vllm/no-such-model", api_base=f"{url}/v1", api_key=key, messages=ask(), num_retries=0
        )
