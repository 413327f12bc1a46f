"""What real clients send without a need is accepted; what would change the answer is refused by its name."""

import asyncio
import json
import time
from typing import Any

import pytest

from actorserve.core.messages import FinishReason
from actorserve.http.chat.dialect import Dialect
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.chat.prompts import ChatPrompts
from actorserve.http.openai.chat.requests import ChatRequest
from actorserve.http.requests.fields import SamplingFields
from actorserve.http.requests.parsing import RequestParser
from actorserve.settings import HttpSettings
from tests.http.fakes import DEADLINE_S, TOKENIZER, VOCAB_SIZE, ScriptedService, client_for, delivered, end, says
from tests.http.requests.refusals import CHAT, ROUTES, refused

Json = dict[str, Any]
TOOL: Json = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
HARMLESS: list[Json] = [
    dict.fromkeys(SamplingFields.model_fields),
    {"metadata": {"a": "b"}, "service_tier": "auto", "store": False, "safety_identifier": "x", "user": "x"},
    {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "logit_bias": {}, "stop": []},
    {"store": None, "metadata": None, "service_tier": None, "skip_special_tokens": True, "use_beam_search": False},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"stream": True, "stream_options": {}},
    {"length_penalty": 1, "bad_words": [], "truncate_prompt_tokens": None},
    {"a_field_of_next_year": {"x": [1]}},
]
HARMLESS_IN_CHATS: list[Json] = [
    {"tools": None, "tool_choice": None, "parallel_tool_calls": None, "response_format": None, "functions": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "auto"},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "prediction": None},
    {"web_search_options": None, "verbosity": "medium", "reasoning_effort": "low"},
    {"prediction": {"type": "content", "content": "x"}, "verbosity": None, "reasoning_effort": None},
    {"top_logprobs": 0},
    {"logprobs": None, "top_logprobs": None, "max_completion_tokens": None},
    {"echo": False, "best_of": 1, "suffix": None, "add_special_tokens": False, "chat_template": None},
    {"chat_template_kwargs": None, "documents": None, "add_generation_prompt": None, "continue_final_message": None},
    {"chat_template_kwargs": {"enable_thinking": False}},
]
MESSAGES: list[list[Json]] = [
    [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "c"}],
    [{"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    [{"role": "user", "content": "b", "tool_calls": [], "function_call": None, "audio": None, "refusal": None}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}],
    [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
    [{"role": "tool", "tool_call_id": "1", "content": None}, {"role": "tool", "content": []}],
    [{"role": "function", "name": "f", "content": None}, {"role": "assistant"}],
    [{"role": "my-own-role", "content": "a"}],
]


async def accepted(route: str, body: Json) -> None:
    async with client_for(says("ok")) as client, asyncio.timeout(DEADLINE_S):
        response = await client.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", HARMLESS)
async def test_harmless_fields(route: str, fields: Json) -> None:
    """Null, defaults and no-ops are accepted, and so are fields that no one knows."""
    await accepted(route, ROUTES[route] | fields)


@pytest.mark.parametrize("fields", HARMLESS_IN_CHATS)
async def test_harmless_fields_of_chats(fields: Json) -> None:
    """So are those of chats."""
    await accepted("chat/completions", CHAT | fields)


@pytest.mark.parametrize("messages", MESSAGES)
async def test_messages(messages: list[Json]) -> None:
    """All of OpenAI's roles, a role that only some model knows, and all forms and fields of messages are accepted."""
    await accepted("chat/completions", {"messages": messages})


REFUSED_BY_NAME: list[tuple[Json, str]] = [
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"documents": [1]}, "documents"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"x{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": [0] * 20_001}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_BY_NAME)
async def test_what_would_change_the_answer_is_refused(fields: Json, param: str) -> None:
    """A known field whose value would change the answer, and that is not supported or is wrong, is a 400 by name."""
    status, error = await refused("chat/completions", json.dumps(CHAT | fields).encode())
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_parts_that_are_no_text_are_named(kind: str) -> None:
    """The error names the type of a part that is no text, and says that only text is supported."""
    messages = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
    _, error = await refused("chat/completions", json.dumps({"messages": messages}).encode())
    assert kind in error["message"]
    assert "only text" in error["message"]


async def test_ignored_fields_are_counted() -> None:
    """Fields that no one knows are counted, wherever they are, under a name without labels; known no-ops are not."""
    async with client_for(says("ok")) as client:
        message = {"role": "user", "content": "x", "made_up": 1, "id": "m"}
        await client.post("/v1/chat/completions", json={"messages": [message], "bogus": 1, "store": False})
        page = (await client.get("/metrics")).text
    assert "actorserve_unknown_fields_total 2.0" in page


def test_tools_in_both_forms() -> None:
    """A tool in the flat form of /v1/responses is the same tool."""
    parser = RequestParser(HttpSettings(), lambda _: None)
    tools = [
        parser.validate(ChatRequest, CHAT | {"tools": [tool]}).tools[0].for_template()
        for tool in (TOOL, {"type": "function", **TOOL["function"]}, TOOL | {"cache_control": {}})
    ]
    assert tools == [TOOL, TOOL, TOOL]


async def test_a_final_message_is_continued() -> None:
    """With ``continue_final_message`` the prompt ends within the assistant's last message."""
    service = says("ok")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "he ll <|end|> "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    async with client_for(service) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    text = TOKENIZER.decode(service.specs[0].prompt_token_ids, skip_special_tokens=False)
    assert text == "<|user|>hello<|end|><|assistant|>he ll <|end|> "


ECHOED: Json = {"echo": True, "messages": [*CHAT["messages"], {"role": "assistant", "content": "I say"}]}


async def test_the_assistants_last_message_is_echoed() -> None:
    """With ``echo`` the answer begins with the assistant's last message, streamed or not, and a user's is not shown."""
    async with client_for(says(" ok")) as client:
        whole = (await client.post("/v1/chat/completions", json=CHAT | ECHOED)).json()
        stream = (await client.post("/v1/chat/completions", json=CHAT | ECHOED | {"stream": True})).text
        of_a_user = (await client.post("/v1/chat/completions", json=CHAT | {"echo": True})).json()
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    assert whole["choices"][0]["message"]["content"] == "I say ok"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "I say ok"
    assert of_a_user["choices"][0]["message"]["content"] == " ok"


async def test_tokens_are_named_by_their_ids() -> None:
    """With return_tokens_as_token_ids the log-probabilities of a chat name tokens by their ids."""
    fields = {"logprobs": True, "return_tokens_as_token_ids": True}
    service = ScriptedService(lambda _: [delivered("x", -0.5), end(FinishReason.STOP)])
    async with client_for(service) as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT | fields)).json()
    [token] = answer["choices"][0]["logprobs"]["content"]
    assert token["token"] == f"token_id:{TOKENIZER.encode('x')[-1]}"


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ({"bad1": 1, "2": 1, "bad2": 1}, ["'bad1'", "'bad2'"]),
        ({"x" * 1000: 1}, ["'" + "x" * 32 + "'"]),
        ({str(VOCAB_SIZE + 1): 1}, [str(VOCAB_SIZE + 1), f"{VOCAB_SIZE} tokens"]),
        ({"7": "much"}, ["7"]),
    ],
)
async def test_wrong_biases_are_named(biases: Json, named: list[str]) -> None:
    """An error about biases names the keys that are wrong, cut off if they are long."""
    _, error = await refused("chat/completions", json.dumps(CHAT | {"logit_bias": biases}).encode())
    assert error["param"] == "logit_bias"
    assert all(name in error["message"] for name in named)
    assert len(error["message"]) < 200


async def test_template_arguments_reach_the_template() -> None:
    """Template arguments, tools and the effort of reasoning are variables of the template, as a client gives them."""
    template = ChatTemplate(
        "{{ enable_thinking }} {{ reasoning_effort }} {{ tools[0].function.name }}", {}, timeout_s=9
    )
    body = CHAT | {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "tools": [TOOL]}
    request = RequestParser(HttpSettings(), lambda _: None).validate(ChatRequest, body)
    prompt = await ChatPrompts(template, TOKENIZER, Dialect(template.source, TOKENIZER)).render(request)
    template.close()
    assert prompt.text == "False low f"


def _deep(depth: int) -> Json:
    value: Json = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(1000)],
        [{"type": "function", "function": {"name": "f", "parameters": _deep(40)}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"enum": list(range(100_000))}}}],
    ],
    ids=["a thousand", "deep", "wide"],
)
async def test_huge_tools_are_refused_soon(tools: list[Json]) -> None:
    """A thousand functions, and schemas that are very deep or large, are a 400 in less than a second."""
    began = time.perf_counter()
    status, error = await refused("chat/completions", json.dumps(CHAT | {"tools": tools}).encode())
    assert (status, error["param"]) == (400, "tools")
    assert time.perf_counter() - began < 1.0
