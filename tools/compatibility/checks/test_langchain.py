"""LangChain's ``ChatOpenAI``, and an agent with a tool."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.messages import AIMessage, HumanMessage, ToolMessage
from langchain.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


@tool
def get_weather(city: Literal["Paris", "Bogotá"]) -> str:
    """Get the weather of a city."""
    return f"It is always sunny in {city}."


class Event(BaseModel):
    """An event."""

    kind: Literal["fair", "concert"]
    is_public: bool


@pytest.fixture(params=["chat", "responses"])
def chat(request: pytest.FixtureRequest, url: str, key: str, model: str) -> ChatOpenAI:
    """The model through each of the two endpoints that ``ChatOpenAI`` can use."""
    return ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key=key,
        max_tokens=20,
        temperature=0,
        max_retries=0,
        use_responses_api=request.param == "responses",
    )


def with_room(chat: ChatOpenAI, max_tokens: int) -> ChatOpenAI:
    """The model with room to end a call, or a structured answer with all the white space that its grammar allows."""
    return chat.model_copy(update={"max_tokens": max_tokens})


def test_invoke(chat: ChatOpenAI) -> None:
    """A chat is answered with text and usage."""
    message = chat.invoke([("system", "Answer briefly."), ("human", "Who wrote Faust?")])
    assert message.text
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    """A streamed chat gives text."""
    assert "".join(chunk.text for chunk in chat.stream("Who wrote Faust?"))


async def test_asynchronous_stream(chat: ChatOpenAI) -> None:
    """An asynchronous stream works, too."""
    assert "".join([chunk.text async for chunk in chat.astream("Who wrote Faust?")])


def test_batch(chat: ChatOpenAI) -> None:
    """Several chats at once are all answered."""
    assert all(message.text for message in chat.batch(["Who wrote Faust?", "Who wrote Hamlet?"]))


def test_bound_tools(chat: ChatOpenAI) -> None:
    """A forced call is run, and the conversation goes on with its result."""
    messages: list[Any] = [HumanMessage("What is the weather like in Paris?")]
    forced = with_room(chat, 200).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    message = forced.invoke(messages)
    assert message.tool_calls
    messages.append(message)
    messages += [get_weather.invoke(call) for call in message.tool_calls]
    assert chat.invoke(messages).text


def test_streamed_tools(chat: ChatOpenAI) -> None:
    """The chunks of a streamed call add up to a call with valid arguments."""
    forced = with_room(chat, 200).bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    whole: Any = None
    for chunk in forced.stream("Is it warm in Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"]["city"] in ("Paris", "Bogotá") for call in whole.tool_calls] == [True]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    """Both ways to a structured answer give an instance of the class."""
    typed = with_room(chat, 600).with_structured_output(Event, method=method)
    answer = typed.invoke("Alice and Bob go to a science fair.")
    assert isinstance(answer, Event)


@wrap_model_call
def force_the_first_call(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """Have the model call one tool first, which a small model does not do by itself."""
    is_first = not any(isinstance(message, ToolMessage) for message in request.messages)
    settings = {"parallel_tool_calls": False}
    return handler(request.override(tool_choice="any" if is_first else "none", model_settings=settings))


def test_agent(chat: ChatOpenAI) -> None:
    """An agent calls its tool, and answers with the tool's result before it."""
    agent = create_agent(
        with_room(chat, 100), tools=[get_weather], system_prompt="Be brief.", middleware=[force_the_first_call]
    )
    question: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    messages = agent.invoke(question)["messages"]
    assert isinstance(messages[1], AIMessage)
    assert messages[1].tool_calls
    assert isinstance(messages[2], ToolMessage)
    assert "sunny" in messages[2].text
    assert isinstance(messages[-1], AIMessage)
    assert messages[-1].text


def test_streamed_agent(chat: ChatOpenAI) -> None:
    """An agent's steps can be streamed."""
    agent = create_agent(with_room(chat, 100), tools=[get_weather], middleware=[force_the_first_call])
    question: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    steps = [name for update in agent.stream(question, stream_mode="updates") for name in update]
    assert steps == ["model", "tools", "model"]


def test_completion(url: str, key: str, model: str) -> None:
    """LangChain's class for completions works, too."""
    llm = OpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_tokens=8, temperature=0)
    assert llm.invoke("Once upon a time")
