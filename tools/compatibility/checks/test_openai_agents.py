"""OpenAI's Agents SDK: runs with a tool, through both of its models."""

from typing import Any, Literal

import pytest
from agents import (
    Agent,
    AgentHooks,
    AgentOutputSchema,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


@function_tool
def get_weather(city: Literal["Paris", "Bogotá"]) -> str:
    """Get the weather of a city."""
    return f"The weather in {city} is sunny."


# The SDK does not accept a response that was cut off, so text ends with its first word, and what a grammar closes has
# room to end.
WORD = ModelSettings(temperature=0, max_tokens=200, tool_choice="none", extra_body={"stop": [" "]})
ONE_CALL = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)


class AnswerAfterTheCall(AgentHooks[Any]):  # type: ignore[misc]  # the SDK is not installed where types are checked
    """Have the model answer once a tool was called. A small model that may choose can go on calling."""

    async def on_tool_end(self, context: Any, agent: Agent[Any], tool: Any, result: Any) -> None:
        agent.model_settings = WORD


class Event(BaseModel):
    """An event."""

    kind: Literal["fair", "concert"]
    is_public: bool


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def served(request: pytest.FixtureRequest, url: str, key: str, model: str) -> Model:
    """The model through each of the two endpoints that the SDK can use."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    made: Model = request.param(model=model, openai_client=client)
    return made


async def test_run(served: Model) -> None:
    """A run ends with text."""
    agent = Agent(name="Assistant", instructions="Be brief.", model=served, model_settings=WORD)
    assert (await Runner.run(agent, "Who wrote Faust?")).final_output


def caller(served: Model) -> Agent[Any]:
    """An agent that calls its tool once."""
    return Agent(
        name="Assistant",
        model=served,
        tools=[get_weather],
        model_settings=ONE_CALL,
        reset_tool_choice=False,
        hooks=AnswerAfterTheCall(),
    )


async def test_run_with_a_tool(served: Model) -> None:
    """An agent calls its tool, and answers with the tool's result before it."""
    result = await Runner.run(caller(served), "What is the weather in Paris?", max_turns=5)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.final_output


async def test_streamed_run_with_a_tool(served: Model) -> None:
    """A streamed run calls its tool, too."""
    result = Runner.run_streamed(caller(served), "What is the weather in Paris?", max_turns=5)
    names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert names[:2] == ["tool_called", "tool_output"]
    assert result.final_output


async def test_second_turn(served: Model) -> None:
    """A run's items are the next run's input, as the SDK's documentation shows."""
    agent = Agent(name="Assistant", model=served, model_settings=WORD)
    first = await Runner.run(agent, "Who wrote Faust?")
    follow_up = [*first.to_input_list(), {"role": "user", "content": "Say more."}]
    assert (await Runner.run(agent, follow_up)).final_output


async def test_structured_output(served: Model) -> None:
    """An agent's output is an instance of its type."""
    agent = Agent(
        name="Assistant",
        model=served,
        output_type=AgentOutputSchema(Event),
        model_settings=ModelSettings(temperature=0, max_tokens=600),
    )
    assert isinstance((await Runner.run(agent, "Alice and Bob go to a science fair.")).final_output, Event)
