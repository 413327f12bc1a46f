"""OpenAI's Python SDK: responses, completions and models. What holds of the checks of chats holds here, too."""

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current temperature of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Bogotá"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Event(BaseModel):
    """What the structured answers hold."""

    kind: Literal["fair", "concert"]
    is_public: bool


@pytest.fixture
def client(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_response(client: OpenAI, model: str) -> None:
    """A response has text, usage and the status that fits its end."""
    response = client.responses.create(
        model=model,
        instructions="Answer briefly.",
        input="Who wrote Faust?",
        max_output_tokens=20,
        temperature=0,
        store=False,
    )
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert response.usage.output_tokens > 0


def test_streamed_response(client: OpenAI, model: str) -> None:
    """A streamed response has OpenAI's typed events in their order, with numbers that rise by one."""
    stream = client.responses.create(
        model=model, input="Who wrote Faust?", max_output_tokens=20, temperature=0, stream=True
    )
    events = list(stream)
    kinds: list[str] = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    order = [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [kinds.index(kind) for kind in order] == sorted(kinds.index(kind) for kind in order)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stream_helper_of_responses(client: OpenAI, model: str) -> None:
    """The SDK's stream helper puts the events together to a response."""
    with client.responses.stream(
        model=model, input="Alice and Bob go to a fair.", text_format=Event, max_output_tokens=600, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text


def test_response_is_sent_back(client: OpenAI, model: str) -> None:
    """A response's output may be the next request's input, as the SDK's documentation shows."""
    history: list[Any] = [{"role": "user", "content": "Who wrote Faust?"}]
    response = client.responses.create(model=model, input=history, max_output_tokens=10, temperature=0, store=False)
    history += response.output
    history.append({"role": "user", "content": "Say more."})
    response = client.responses.create(model=model, input=history, max_output_tokens=10, temperature=0, store=False)
    assert response.output_text


def test_tools_of_responses(client: OpenAI, model: str) -> None:
    """A forced call has valid arguments, and the conversation goes on with the tool's result."""
    history: list[Any] = [{"role": "user", "content": "What is the weather like in Paris?"}]
    response = client.responses.create(
        model=model,
        input=history,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    history += response.output
    for call in calls:
        assert json.loads(call.arguments)["city"] in ("Paris", "Bogotá")
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "14 °C"})
    final = client.responses.create(
        model=model, input=history, tools=[WEATHER], tool_choice="none", max_output_tokens=20, temperature=0
    )
    assert final.output_text


def test_streamed_tools_of_responses(client: OpenAI, model: str) -> None:
    """A streamed call's arguments come in deltas, and whole at the end."""
    stream = client.responses.create(
        model=model,
        input="What is the weather like in Paris?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        max_output_tokens=200,
        temperature=0,
    )
    deltas, done = "", ""
    for event in stream:
        if event.type == "response.function_call_arguments.delta":
            deltas += event.delta
        if event.type == "response.function_call_arguments.done":
            done = event.arguments
    assert done == deltas
    assert json.loads(done)["city"] in ("Paris", "Bogotá")


def test_structured_response(client: OpenAI, model: str) -> None:
    """``parse`` gives an instance of the class."""
    response = client.responses.parse(
        model=model,
        input="Alice and Bob are going to a science fair.",
        text_format=Event,
        max_output_tokens=600,
        temperature=0,
    )
    assert isinstance(response.output_parsed, Event)


def test_stored_responses_are_refused(client: OpenAI, model: str) -> None:
    """The server keeps no conversation, so a response that continues a stored one is refused, and the field named."""
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=model, input="Say more.", previous_response_id="resp_123")
    assert error.value.param == "previous_response_id"


def test_completion(client: OpenAI, model: str) -> None:
    """A prompt is continued."""
    completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert completion.choices[0].text


def test_streamed_completion(client: OpenAI, model: str) -> None:
    """A streamed completion gives the text that the whole one gives."""
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    stream = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_echo_with_log_probabilities(client: OpenAI, model: str) -> None:
    """With ``echo`` the prompt comes back, and its tokens have log-probabilities except the first."""
    choice = client.completions.create(
        model=model, prompt="The sky is blue", max_tokens=1, echo=True, logprobs=1, temperature=0
    ).choices[0]
    assert choice.text.startswith("The sky is blue")
    assert choice.logprobs is not None
    values: list[float | None] = list(choice.logprobs.token_logprobs or [])
    assert values[0] is None
    assert all(value is not None and value <= 0 for value in values[1:])
    assert len(values) == len(choice.logprobs.tokens or [])


def test_models(client: OpenAI, model: str) -> None:
    """The served model is listed, and is found by its name."""
    assert model in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_embeddings_are_refused(client: OpenAI, model: str) -> None:
    """What the server does not have is an error of OpenAI's shape that says so."""
    with pytest.raises(openai.APIStatusError) as error:
        client.embeddings.create(model=model, input="text")
    assert error.value.status_code in (400, 404, 501)
    assert "embeddings" in error.value.message
