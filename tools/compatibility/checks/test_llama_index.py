"""LlamaIndex's ``OpenAILike``."""

from typing import Any, Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def get_weather(city: Literal["Paris", "Bogotá"]) -> str:
    """Get the weather of a city."""
    return f"It is always sunny in {city}."


class Event(BaseModel):
    """An event."""

    kind: Literal["fair", "concert"]
    is_public: bool


@pytest.fixture
def llm(url: str, key: str, model: str) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=key,
        context_window=2048,
        max_tokens=200,
        temperature=0,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
    )


def test_chat(llm: OpenAILike) -> None:
    """A chat is answered with text."""
    messages = [ChatMessage(role="system", content="Answer briefly."), ChatMessage(role="user", content="Who are you?")]
    assert llm.chat(messages).message.content


def test_streamed_chat(llm: OpenAILike) -> None:
    """A streamed chat gives text."""
    assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(role="user", content="Who are you?")]))


def test_an_answer_is_sent_back(llm: OpenAILike) -> None:
    """The server takes back the message that it answered with."""
    messages = [ChatMessage(role="user", content="Who are you?")]
    messages.append(llm.chat(messages).message)
    messages.append(ChatMessage(role="user", content="Say more."))
    assert llm.chat(messages).message.content


def test_completion(url: str, key: str, model: str) -> None:
    """A prompt is continued, whole and streamed."""
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key=key, context_window=2048, max_tokens=8, temperature=0)
    assert llm.complete("Once upon a time").text
    assert "".join(part.delta or "" for part in llm.stream_complete("Once upon a time"))


def test_tools_in_a_loop(llm: OpenAILike) -> None:
    """A forced call is run, and the conversation goes on with its result."""
    weather = FunctionTool.from_defaults(fn=get_weather)
    history = [ChatMessage(role="user", content="What is the weather like in Paris?")]
    response = llm.chat_with_tools([weather], chat_history=history, tool_required=True)
    calls = llm.get_tool_calls_from_response(response)
    assert calls
    history.append(response.message)
    for call in calls:
        output = weather(**call.tool_kwargs)
        assert "sunny" in output.content
        history.append(
            ChatMessage(role="tool", content=output.content, additional_kwargs={"tool_call_id": call.tool_id})
        )
    assert llm.chat(history).message.content


def test_structured_answer(llm: OpenAILike) -> None:
    """A structured prediction is an instance of the class."""
    answer: Any = llm.structured_predict(Event, PromptTemplate("Alice and Bob go to a science fair."))
    assert isinstance(answer, Event)


async def test_asynchronous_chat(llm: OpenAILike) -> None:
    """The asynchronous calls work, too."""
    assert (await llm.achat([ChatMessage(role="user", content="Who are you?")])).message.content
