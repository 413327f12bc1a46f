"""What ``/v1/messages`` accepts and refuses, and the prompt that it makes of it."""

from typing import Any

import httpx
import pytest

from actorserve.settings import HttpSettings
from tests.http.agents import CITY, agent_app, prompt_of, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService

QUESTION: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [QUESTION]}
LASTING = {"type": "ephemeral"}
DATED = CITY | {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}

# What Claude Code sends, in our own words: parts to cache, many fields of betas, and system messages between turns.
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": False,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e3"},
        {"type": "text", "text": "You help with code.", "cache_control": LASTING},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                {"type": "text", "text": "list files", "cache_control": LASTING},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ls", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I list."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}, "caller": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "a.py"}],
                    "is_error": False,
                    "cache_control": LASTING,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "be careful"},
    ],
    "tools": [
        {"name": f"Tool{number}", "description": "does it", "input_schema": DATED, "eager_input_streaming": True}
        for number in range(30)
    ],
    "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "speed": "standard",
    "diagnostics": {"previous_message_id": None},
    "some_later_field": {"a": 1},
}


async def post(
    service: ScriptedService, body: dict[str, Any], path: str = "", settings: HttpSettings | None = None
) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,some-later-beta"}
    transport = httpx.ASGITransport(agent_app(service, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        return await client.post(f"/v1/messages{path}?beta=true", json=body)


async def prompt(**fields: Any) -> str:
    """The prompt of a request with these fields."""
    service = thinks_and_calls("ok")
    response = await post(service, BODY | fields)
    assert response.status_code == 200, response.text
    return prompt_of(service)


async def refusal(**fields: Any) -> str:
    """The message of the error for these fields."""
    response = await post(thinks_and_calls("ok"), BODY | fields)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


async def test_claude_code() -> None:
    """Claude Code's requests are served, without its attribution, which would differ in every prompt."""
    service = thinks_and_calls("ok")
    response = await post(service, CLAUDE_CODE)
    assert response.status_code == 200, response.text
    tools = "".join(f"<|tool|>Tool{number}" for number in range(30))
    assert prompt_of(service) == (
        f"{tools}<|system|>You help with code.\n\nBe brief.<|end|>"
        "<|user|><system-reminder>today</system-reminder>\nlist files<|end|>"
        "<|assistant|><think>ls</think>I list."
        '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call><|end|>'
        "<|tool|>a.py<|end|><|user|>go on<|end|><|system|>be careful<|end|><|assistant|>"
    )


async def test_claude_code_counts_tokens() -> None:
    """The same request without its limit can be counted."""
    service = thinks_and_calls("ok")
    body = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream")}
    counted = await post(service, body, "/count_tokens")
    await post(service, CLAUDE_CODE)
    assert counted.json() == {"input_tokens": len(service.specs[0].prompt_token_ids)}


async def test_unknown_fields_can_be_refused() -> None:
    """An operator may have unknown fields refused; they are named."""
    response = await post(thinks_and_calls("ok"), CLAUDE_CODE, settings=HttpSettings(unknown_fields="refuse"))
    assert response.status_code == 400
    assert "some_later_field" in response.json()["error"]["message"]


async def test_null_means_the_default() -> None:
    """A field that is null means the same as a missing field."""
    optional = ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "temperature")
    others = ("top_p", "top_k", "stream", "metadata", "service_tier", "container", "mcp_servers", "cache_control")
    assert await prompt(**dict.fromkeys([*optional, *others])) == await prompt()


async def test_sampling_fields_reach_the_worker() -> None:
    """Limits and sampling fields are those of the request."""
    service = thinks_and_calls("ok")
    await post(service, BODY | {"temperature": 0.5, "top_p": 0.25, "top_k": 7})
    sampling = service.specs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 9)


async def test_a_failed_tool_is_told() -> None:
    """A result with ``is_error`` reads as an error, and results come before other text of their message."""
    content = [
        {"type": "text", "text": "so?"},
        {"type": "tool_result", "tool_use_id": "t", "content": "no file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "u"},
    ]
    assert (await prompt(messages=[{"role": "user", "content": content}])).startswith(
        "<|tool|>Error: no file<|end|><|tool|><|end|><|user|>so?<|end|>"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"model": None}, ["model"]),
        ({"temperature": 1.5}, ["temperature"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [QUESTION] * 10_001}, ["messages", "10000"]),
        ({"messages": [QUESTION, {"role": "user", "content": [{}] * 10_001}]}, ["messages", "10000"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}] * 10_001}]}]},
            ["messages", "10000"],
        ),
        ({"system": [{}] * 10_001}, ["system", "10000"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages: message 0", "role"]),
        ({"messages": [QUESTION, {"role": "user", "content": 7}]}, ["message 1", "content"]),
        ({"messages": [{"role": "user", "content": []}]}, ["messages"]),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, ["block 0", "'image'"]),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, ["'document'"]),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, ["'tool_use'"]),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, ["'server_tool_use'"]),
        ({"system": [{"type": "image"}]}, ["system", "'image'"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tool 0", "web_search_20250305"]),
        ({"tools": [{"name": "a"}]}, ["tool 0", "input_schema"]),
        ({"tools": [{"name": "a", "input_schema": {}}] * 2}, ["two tools", "a"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice"]),
        ({"tool_choice": {"type": "tool"}}, ["tool_choice", "name"]),
        ({"thinking": {"type": "often"}}, ["thinking"]),
        ({"stop_sequences": "x"}, ["stop_sequences"]),
        ({"stop_sequences": [""]}, ["stop_sequences"]),
        ({"stop_sequences": ["x"] * 99}, ["stop_sequences"]),
        ({"container": "c"}, ["container"]),
        ({"mcp_servers": [{"url": "http://x"}]}, ["mcp_servers"]),
        ({"output_config": {"format": {"type": "xml"}}}, ["output_config", "format"]),
    ],
)
async def test_wrong_fields_are_named(fields: dict[str, Any], words: list[str]) -> None:
    """A value that cannot be honoured is refused, in the words of this API."""
    message = await refusal(**fields)
    for word in words:
        assert word in message
