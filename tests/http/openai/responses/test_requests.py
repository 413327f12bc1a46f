"""What ``/v1/responses`` accepts and refuses, and the prompt that it makes of it."""

from typing import Any

import httpx
import pytest

from actorserve.settings import HttpSettings
from tests.http.agents import CITY, agent_app, call, prompt_of, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService

# What clients send, in our own words.
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}]},
        {"type": "function_call", "id": "f", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "id": "o", "call_id": "call_1", "output": "a.py"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": CITY, "description": "runs"},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__notes__",
            "description": "notes",
            "tools": [{"type": "function", "name": "find", "parameters": CITY, "defer_loading": True}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "client_metadata": {"session": "s"},
}
AI_SDK: dict[str, Any] = {
    "model": MODEL,
    "input": [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city":"Oslo"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
    ],
    "temperature": 0,
    "max_output_tokens": 64,
    "store": False,
    "tools": [{"type": "function", "name": "weather", "description": "d", "parameters": CITY, "strict": None}],
    "tool_choice": {"type": "function", "name": "weather"},
}
AGENTS: dict[str, Any] = {
    "model": MODEL,
    "instructions": "be kind",
    "include": [],
    "input": [{"content": "weather?", "role": "user"}],
    "tools": [
        {"name": "weather", "parameters": CITY, "strict": True, "type": "function", "description": "d"},
        {"name": "transfer_to_editor", "parameters": {"type": "object", "properties": {}}, "type": "function"},
    ],
    "parallel_tool_calls": None,
    "tool_choice": "auto",
    "stream": False,
    "metadata": {"trace": "t"},
    "some_later_field": 1,
}


async def post(service: ScriptedService, body: dict[str, Any], settings: HttpSettings | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(agent_app(service, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post("/v1/responses", json=body)


async def answer(written: str = "ok", **fields: Any) -> tuple[dict[str, Any], str]:
    """The answer to a request with these fields, for which the model has ``written`` something, and the prompt."""
    service = thinks_and_calls(written)
    response = await post(service, {"input": "hi"} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body, prompt_of(service)


async def test_codex() -> None:
    """Codex's requests are served: one system message, one message for a turn, and no search that finds nothing."""
    body, prompt = await answer(call("mcp__notes__find", city="Oslo"), **CODEX)
    assert prompt == (
        "<|tool|>exec_command<|tool|>mcp__notes__find"
        "<|system|>You are a coding agent.\n\nAsk before you write.<|end|><|user|>list files<|end|>"
        '<|assistant|><think>ls</think><tool_call>{"name": "exec_command", "arguments": {"cmd": "ls"}}</tool_call>'
        "<|end|><|tool|>a.py<|end|><|assistant|>One file.<|end|><|user|>go on<|end|><|assistant|>"
    )
    assert [tool["type"] for tool in body["tools"]] == ["function", "namespace"]
    (called,) = body["output"]
    assert (called["namespace"], called["name"]) == ("mcp__notes__", "find")
    again = {**CODEX, "input": [*CODEX["input"], called]}
    assert '"name": "mcp__notes__find"' in (await answer(**again))[1]


async def test_ai_sdk() -> None:
    """The AI SDK's requests are served."""
    body, prompt = await answer(**AI_SDK)
    assert prompt == (
        "<|tool|>weather<|system|>be kind<|end|><|user|>weather?<|end|><|assistant|>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
        "<|tool|>rain<|end|><|assistant|>"
    )
    assert body["tool_choice"] == {"type": "function", "name": "weather"}
    assert body["max_output_tokens"] == 64


async def test_openai_agents() -> None:
    """The requests of OpenAI's agents are served, and metadata come back."""
    body, prompt = await answer(**AGENTS)
    assert prompt.startswith("<|tool|>weather<|tool|>transfer_to_editor<|system|>be kind<|end|><|user|>weather?")
    assert body["metadata"] == {"trace": "t"}


async def test_unknown_fields_can_be_refused() -> None:
    """An operator may have unknown fields refused; they are named."""
    response = await post(thinks_and_calls("ok"), AGENTS, HttpSettings(unknown_fields="refuse"))
    assert response.status_code == 400
    assert "some_later_field" in response.json()["error"]["message"]


async def test_null_means_the_default() -> None:
    """A field that is null is as good as none."""
    names = ("instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens", "top_logprobs")
    others = ("store", "metadata", "include", "background", "truncation", "conversation", "previous_response_id")
    nulls: dict[str, Any] = dict.fromkeys([*names, *others, "temperature", "stream", "prompt"])
    assert (await answer(**nulls))[1] == (await answer())[1]


async def test_what_is_not_asked_for_is_accepted() -> None:
    """Values that ask for nothing special are accepted, and the answer says that nothing is stored."""
    body, _ = await answer(
        store=False, background=False, truncation="disabled", context_management=[], service_tier="auto", user="u"
    )
    assert body["store"] is False
    assert body["previous_response_id"] is None


async def test_sampling_fields_reach_the_worker() -> None:
    """OpenAI's sampling fields and vLLM's further ones are those of the request."""
    service = thinks_and_calls("ok")
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3, "min_p": 0.1, "stop": ["x"], "priority": 2}
    more = {"logit_bias": {"5": 1.0}, "stop_token_ids": [9], "max_output_tokens": 11, "top_logprobs": 2}
    response = await post(service, {"input": "hi"} | fields | more)
    assert response.status_code == 200
    (spec,) = service.specs
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.1)
    assert (sampling.max_tokens, sampling.top_logprobs, sampling.logit_bias) == (11, 2, ((5, 1.0),))
    assert 9 in sampling.stop_token_ids
    assert spec.priority == 2


async def test_a_limit_beyond_the_context_is_no_error() -> None:
    """``max_output_tokens`` is a limit, so the context may end the answer before."""
    service = thinks_and_calls("ok")
    response = await post(service, {"input": "hi", "max_output_tokens": 2_000_000_000})
    assert response.status_code == 200
    (spec,) = service.specs
    assert service.model is not None
    assert spec.sampling.max_tokens == service.model.max_tokens - len(spec.prompt_token_ids)


async def test_only_allowed_tools_are_offered() -> None:
    """``allowed_tools`` leaves the model the functions that it names."""
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    tools = [{"type": "function", "name": name, "parameters": CITY} for name in "abc"]
    _, prompt = await answer(tools=tools, tool_choice=allowed)
    assert prompt.startswith("<|tool|>b<|user|>")


async def test_a_summary_stands_for_missing_thoughts() -> None:
    """A reasoning item without its text is read by its summary; one without both is no message."""
    thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "so"}]}
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    question = {"role": "user", "content": "?"}
    _, prompt = await answer(input=[question, thought, {"role": "assistant", "content": "a"}, question, empty])
    assert prompt == ("<|user|>?<|end|><|assistant|><think>so</think>a<|end|><|user|>?<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, ["input"]),
        ({"input": []}, ["input"]),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, ["input", "10000"]),
        ({"input": [7]}, ["item 0"]),
        ({"input": [{"role": "user"}]}, ["item 0", "content"]),
        ({"input": [{"role": "cat", "content": "x"}]}, ["item 0", "role"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, ["input_image"]),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, ["input_file"]),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, ["item 0", "store: false"]),
        ({"input": [{"type": "computer_call", "id": "c"}]}, ["item 0", "'computer_call'"]),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, ["item 0", "call_id"]),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": 7}]}, ["item 0", "arguments"]),
        ({"store": True}, ["store"]),
        ({"background": True}, ["background"]),
        ({"previous_response_id": "resp_1"}, ["previous_response_id"]),
        ({"conversation": "conv_1"}, ["conversation"]),
        ({"prompt": {"id": "p"}}, ["prompt"]),
        ({"truncation": "auto"}, ["truncation"]),
        ({"max_tokens": 5}, ["max_output_tokens"]),
        ({"prompt_logprobs": 1}, ["prompt_logprobs"]),
        ({"max_output_tokens": 0}, ["max_output_tokens"]),
        ({"n": 2}, ["n: "]),
        ({"top_logprobs": 21}, ["top_logprobs"]),
        ({"include": "x"}, ["include"]),
        ({"metadata": {"a": 1}}, ["metadata"]),
        ({"text": {"format": {"type": "xml"}}}, ["text.format"]),
        ({"tools": [{"type": "web_search"}]}, ["tool 0", "'web_search'"]),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, ["tool 0", "'custom'"]),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "a"}]}]}, ["namespace"]),
        ({"tools": [{"type": "function"}]}, ["tool 0", "name"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tool_choice": {"type": "file_search"}}, ["tool_choice", "'file_search'"]),
        ({"tool_choice": {"type": "function", "name": "gone"}}, ["tool_choice"]),
    ],
)
async def test_wrong_fields_are_named(fields: dict[str, Any], words: list[str]) -> None:
    """A value that cannot be honoured is refused, in the words of this API."""
    response = await post(thinks_and_calls("ok"), {"input": "hi"} | fields)
    assert response.status_code == 400, response.text
    for word in words:
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items")],
)
async def test_nothing_is_stored(method: str, path: str) -> None:
    """No response can be fetched later, and the error says why."""
    transport = httpx.ASGITransport(agent_app(ScriptedService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.request(method, f"/v1/responses/{path}")
    assert response.status_code == 404
    assert "keeps no responses" in response.json()["error"]["message"]
