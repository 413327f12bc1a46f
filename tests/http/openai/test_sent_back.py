"""Whatever the server answers may be sent back to it, and the model sees the same text."""

import asyncio
from typing import Any

import openai
from hypothesis import given, settings, strategies as st
from openai.types.chat import ChatCompletion

from actorserve.core.messages import ModelInfo
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.openai.chat.messages import ChatMessage
from tests.http.fakes import DEADLINE_S, MODEL, TOKENIZER, VOCAB_SIZE, app_for, client_for, says, serving

Json = dict[str, Any]
QUESTION: Json = {"role": "user", "content": "hello"}

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_ARGUMENTS = st.sampled_from(["{}", "", '{"a": [1, {"b": null}]}', "not JSON", "[1]", '{"a": "\\ud800"}']) | _TEXT
_FUNCTION = st.fixed_dictionaries({"name": st.sampled_from(["f", "get_weather"]), "arguments": _ARGUMENTS})
_CALL = st.fixed_dictionaries(
    {"id": st.sampled_from(["call_1", "abcdefghi"]), "type": st.just("function"), "function": _FUNCTION},
    optional={"index": st.integers(0, 3)},
)
_CITATION = {
    "type": "url_citation",
    "url_citation": {"url": "x", "title": "y", "start_index": 0, "end_index": 1},
}
_ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | _TEXT},
    optional={
        "refusal": st.none() | _TEXT,
        "reasoning_content": st.none() | _TEXT,
        "reasoning": st.none() | _TEXT,
        "tool_calls": st.none() | st.lists(_CALL, max_size=3),
        "function_call": st.none() | _FUNCTION,
        "annotations": st.none() | st.just([]) | st.just([_CITATION]),
        "audio": st.none(),
        "id": st.none() | st.just("msg_1"),
        "provider_specific_fields": st.just({"x": [1]}),
        "made_up": st.integers(),
    },
)


def _completion(message: Json) -> Json:
    """An answer as a server sends it, whose only choice is ``message``."""
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}


async def _seen(messages: list[Json]) -> str:
    """The prompt's text that the model sees for these messages."""
    service = says("ok")
    service.model = ModelInfo(MODEL, VOCAB_SIZE, 10_000)
    async with client_for(service) as client, asyncio.timeout(DEADLINE_S):
        response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    return TOKENIZER.decode(service.specs[0].prompt_token_ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(answer=_ANSWERS)
async def test_any_answer_may_be_sent_back(answer: Json) -> None:
    """An answer's message is accepted in the next request: as it came, and as the SDK's object writes it."""
    parsed = ChatCompletion.model_validate(_completion(answer)).choices[0].message
    forms = [answer, parsed.model_dump(), parsed.model_dump(exclude_none=True), parsed.model_dump(exclude_unset=True)]
    calls = [{"role": "tool", "tool_call_id": call["id"], "content": None} for call in answer.get("tool_calls") or []]
    seen = [await _seen([QUESTION, form, *calls, QUESTION]) for form in forms]
    assert len(set(seen)) == 1
    assert (answer["content"] or answer.get("refusal") or "") in seen[0]


async def test_our_own_answer_may_be_sent_back() -> None:
    """The SDK's idiom: the message that this server answered is appended to the messages of the next request."""
    service = says("he ll")
    async with (
        serving(app_for(service)) as (url, _),
        openai.AsyncOpenAI(api_key="-", base_url=f"{url}/v1") as client,
    ):
        messages: list[Any] = [QUESTION]
        for _ in range(2):
            answer = await client.chat.completions.create(model="tiny", messages=messages)
            messages += [answer.choices[0].message, QUESTION]
    text = TOKENIZER.decode(service.specs[1].prompt_token_ids, skip_special_tokens=False)
    assert "<|assistant|>he ll<|end|>" in text


async def test_templates_get_an_answer_in_their_form() -> None:
    """A template finds arguments as an object, tool calls only where there are some, and what a tool answers."""
    message = ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}},
            ],
        }
    )
    template = ChatTemplate("{{ messages | tojson }}", {}, timeout_s=30.0)
    text = await template.render([message.for_template()])
    template.close()
    assert text == (
        '[{"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": ['
        '{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, '
        '{"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]'
    )
    plain = ChatMessage.model_validate({"role": "assistant", "content": "x", "tool_calls": None, "function_call": None})
    assert plain.for_template() == {"role": "assistant", "content": "x"}
    old = ChatMessage.model_validate({"role": "function", "name": "f", "content": [{"type": "text", "text": "1"}]})
    assert old.for_template() == {"role": "tool", "content": "1", "name": "f"}
