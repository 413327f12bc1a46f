"""Whatever an agents' protocol answers may be sent back to it, and reads as the model wrote it."""

from typing import Any

import httpx
from hypothesis import given, settings, strategies as st

from actorserve.core.messages import FinishReason
from tests.http.agents import CITY, agent_app, call, prompt_of, thinks_and_calls
from tests.http.fakes import MODEL, ScriptedService

TOOLS = ("weather", "time")
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
CALLS = st.builds(lambda name, city: call(name, city=city), st.sampled_from(TOOLS), TEXTS)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
QUESTION = {"role": "user", "content": "?"}


@st.composite
def outputs(draw: st.DrawFn) -> str:
    """What a model may write: thoughts, text and calls, or the beginning of that."""
    thoughts = draw(st.one_of(st.just(""), TEXTS.map("<think>{}</think>".format)))
    written = thoughts + draw(TEXTS) + "".join(draw(st.lists(CALLS, max_size=3)))
    return written[: draw(st.integers(0, len(written)))] if draw(st.booleans()) else written


async def post(service: ScriptedService, path: str, body: dict[str, Any]) -> dict[str, Any]:
    transport = httpx.ASGITransport(agent_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@given(written=outputs(), reason=REASONS)
@settings(max_examples=60)
async def test_responses(written: str, reason: FinishReason) -> None:
    """The output of a response is an input, also if it was cut off anywhere."""
    service = thinks_and_calls(written, reason)
    tools = [{"type": "function", "name": name, "parameters": CITY} for name in TOOLS]
    answer = await post(service, "/v1/responses", {"input": [QUESTION], "tools": tools})
    await post(service, "/v1/responses", {"input": [QUESTION, *answer["output"], QUESTION], "tools": tools})
    check(prompt_of(service), answer["output"])


@given(written=outputs(), reason=REASONS)
@settings(max_examples=60)
async def test_messages(written: str, reason: FinishReason) -> None:
    """A message of an answer is a message of a request, also if it was cut off anywhere."""
    service = thinks_and_calls(written, reason)
    tools = [{"name": name, "input_schema": CITY} for name in TOOLS]
    question = {"max_tokens": 999, "messages": [QUESTION], "tools": tools}
    answer = await post(service, "/v1/messages", question)
    again = question | {"messages": [QUESTION, answer, QUESTION]}
    await post(service, "/v1/messages", again)
    check(prompt_of(service), answer["content"])


def check(prompt: str, parts: list[dict[str, Any]]) -> None:
    """The thoughts, texts and names of calls stand in the prompt."""
    for part in parts:
        match part:
            case {"type": "message" | "reasoning", "content": [{"text": text}]}:
                assert text in prompt
            case {"type": "text", "text": text} | {"type": "thinking", "thinking": text}:
                assert text in prompt
            case {"type": "function_call" | "tool_use", "name": name}:
                assert f'"name": "{name}"' in prompt
            case _:
                raise AssertionError(part)
