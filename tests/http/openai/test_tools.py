"""Tool calls and reasoning, as OpenAI's SDK reads them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, ModelInfo
from tests.http.fakes import (
    DEADLINE_S,
    MODEL,
    TEMPLATE,
    TOKENIZER,
    VOCAB_SIZE,
    ScriptedService,
    app_for,
    delivered,
    end,
    one_by_one,
    serving,
)

AT = {"type": "string"}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"at": AT}}}}
    for name in ("look", "go")
]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
GO = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
THINKING = TEMPLATE + "{# </think> #}"
KNOWS_TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}" + TEMPLATE


class Model:
    """A model that answers every request with the same tokens, behind a real server."""

    def __init__(self, answer: str | list[Deliver | End], *, template: str = TEMPLATE) -> None:
        effects = one_by_one(answer, FinishReason.STOP) if isinstance(answer, str) else answer
        self.service = ScriptedService(lambda _: effects)
        self.service.model = ModelInfo(MODEL, VOCAB_SIZE, 10_000)
        self._template = template

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        async with (
            serving(app_for(self.service, template=self._template)) as (url, _),
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
        ):
            yield client

    async def both(self, **fields: Any) -> list[Any]:
        """The choices of the whole answer, which are those that the SDK's helper makes of the stream."""
        fields = {"model": MODEL, "messages": MESSAGES, **fields}
        async with self.client() as client:
            whole = (await client.chat.completions.create(**fields)).choices
            async with client.chat.completions.stream(**fields) as stream:
                streamed = (await stream.get_final_completion()).choices
        assert [_plain(choice) for choice in streamed] == [_plain(choice) for choice in whole]
        return list(whole)

    async def chunks(self, **fields: Any) -> list[Any]:
        """The choices in the chunks of the streamed answer."""
        fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **fields}
        async with self.client() as client:
            return [chunk.choices[0] async for chunk in await client.chat.completions.create(stream=True, **fields)]

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.service.specs[-1].prompt_token_ids, skip_special_tokens=False)


def _plain(choice: Any) -> Any:
    """A choice without what differs: random ids, the SDK's parsed fields, and whether missing text is null or empty."""
    message = choice.message
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None)
    return choice.index, choice.finish_reason, message.role, message.content or "", reasoning, calls


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


async def test_calls_alone() -> None:
    """An answer of calls has no content, and ends because of them; every call has an id of its own."""
    model = Model(f"{LOOK}\n{GO}")
    (choice,) = await model.both(tools=TOOLS)
    assert calls_of(choice) == [("look", '{"at": "x"}'), ("go", "{}")]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_calls_in_several_choices() -> None:
    """Every choice has its own calls."""
    choices = await Model(f"I look.\n{LOOK}").both(tools=TOOLS, n=3)
    assert [calls_of(choice) for choice in choices] == 3 * [[("look", '{"at": "x"}')]]
    assert [choice.message.content for choice in choices] == 3 * ["I look."]


async def test_chunks_of_a_call() -> None:
    """The first chunk of a call has its id and name; later chunks have its index and further arguments only."""
    deltas = [chunk.delta.model_dump(exclude_unset=True) for chunk in await Model(LOOK).chunks()]
    role, first, *others, last = deltas
    assert (role, last) == ({"role": "assistant", "content": ""}, {})
    (call,) = first["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "look", "arguments": "{"}}
    fragments = [delta["tool_calls"] for delta in others]
    assert all(fragment[0].keys() == {"index", "function"} for fragment in fragments)
    assert "".join(fragment[0]["function"]["arguments"] for fragment in fragments) == '"at": "x"}'


async def test_a_call_that_is_cut_off() -> None:
    """A call that reaches the token limit ends for that reason, with the arguments so far."""
    chunks = await Model(one_by_one(LOOK[:-16], FinishReason.LENGTH)).chunks()
    arguments = [call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert ("".join(arguments), chunks[-1].finish_reason) == ('{"at": "x', "length")


async def test_a_single_call() -> None:
    """With ``parallel_tool_calls: false`` the answer has one call at most."""
    (choice,) = await Model(f"{LOOK}{GO}").both(tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("look", '{"at": "x"}')]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_complete_call_ends_the_generation(stream: bool) -> None:
    """With ``parallel_tool_calls: false`` nothing more is generated behind the first call, and it counts no tokens."""
    model = Model("")
    model.service.script = None
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    async with model.client() as client:
        chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, **fields)
        asking = asyncio.create_task(_last(chat))
        request = await model.service.request()
        called = LOOK.removesuffix("\n</tool_call>")
        request.feed(one_by_one(called)[:-1])  # the model has not ended its answer
        finish_reason, usage = await asyncio.wait_for(asking, DEADLINE_S)
    assert finish_reason == "tool_calls"
    assert usage.completion_tokens == len(TOKENIZER.encode(called))
    assert request.released.is_set()


async def _last(answer: Any) -> tuple[str | None, Any]:
    """The finish reason and the usage of an answer, streamed or not."""
    answer = await answer
    if not hasattr(answer, "__aiter__"):
        return answer.choices[0].finish_reason, answer.usage
    *_, last, usage = [chunk async for chunk in answer]
    return last.choices[0].finish_reason, usage.usage


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_no_calls_wanted(fields: dict[str, Any]) -> None:
    """Without tools, and with ``tool_choice: "none"``, what looks like a call is text."""
    (choice,) = await Model(LOOK).both(**fields)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (LOOK, None, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "thoughts"), [("<think>Hm. So</think>Yes.", "<think>Hm. So"), ("<think>Hm", "<think>Hm"), ("Yes.", "")]
)
async def test_the_tokens_of_thoughts_are_counted(stream: bool, text: str, thoughts: str) -> None:
    """The usage tells how many of the output's tokens were thoughts, as OpenAI's API does."""
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    async with Model(text, template=THINKING).client() as client:
        _, usage = await _last(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, n=2, **fields)
        )
    assert usage.completion_tokens_details.reasoning_tokens == 2 * len(TOKENIZER.encode(thoughts))


async def test_reasoning() -> None:
    """Thoughts have fields of their own, whole and streamed, and calls in them do not count."""
    model = Model(f"<think>\nHm. {LOOK}\n</think>\n\nYes.", template=THINKING)
    (choice,) = await model.both(tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == ("Yes.", "stop")
    assert choice.message.reasoning_content == choice.message.reasoning == f"Hm. {LOOK}"


async def test_thoughts_that_the_prompt_begins() -> None:
    """If the template opens the thoughts, the model's text begins inside of them."""
    (choice,) = await Model("Hm.</think>Yes.", template=f"{THINKING}<think>\n").both()
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("begun", [THINKING, f"{THINKING}<think>\n"])
async def test_thoughts_can_be_left_out(begun: str) -> None:
    """With include_reasoning: false an answer has neither of the fields of thoughts, and its text is the same."""
    model = Model("Hm.</think>Yes." if begun != THINKING else "<think>Hm.</think>Yes.", template=begun)
    fields: dict[str, Any] = {"extra_body": {"include_reasoning": False}}
    (choice,) = await model.both(**fields)
    assert choice.message.content == "Yes."
    assert not (choice.message.model_extra or {}).keys() & {"reasoning", "reasoning_content"}
    chunks = await model.chunks(**fields)
    assert not any((chunk.delta.model_extra or {}).get("reasoning") for chunk in chunks)


async def test_a_conversation_with_tools() -> None:
    """The SDK's message goes back as it came, with a tool's result, and the prompt shows both as text."""
    model = Model(f"I look.\n{LOOK}")
    (choice,) = await model.both(tools=TOOLS)
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "A tree."}
    await model.both(messages=[*MESSAGES, choice.message, result], tools=TOOLS)
    assert f"<|assistant|>I look.\n{LOOK}<|end|>" in model.prompt
    assert "<|user|><tool_response>\nA tree.\n</tool_response><|end|>" in model.prompt
    assert '"name": "go"' in model.prompt.partition("<|user|>")[0]


async def test_a_template_that_knows_tools() -> None:
    """Such a template gets the tools, and its messages stay as they are."""
    model = Model("Yes.", template=KNOWS_TOOLS)
    await model.both(tools=TOOLS)
    assert model.prompt.startswith('[[{"type": "function", "function": {"name": "look", ')
    assert model.prompt.endswith("]<|user|>hi<|end|><|assistant|>")


async def test_log_probabilities_of_calls() -> None:
    """Every token's log-probability is in the stream once and in order, also where its text is markup."""
    chunks = await Model([delivered(LOOK, -0.5), end(FinishReason.STOP)]).chunks(logprobs=True)
    shown = [token.token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content or ()]
    assert "".join(shown) == LOOK


async def grammar_of(template: str = TEMPLATE, **fields: Any) -> LLMatcher | None:
    """A matcher of the grammar in the workers' request, over bytes."""
    model = Model(LOOK, template=template)
    await model.both(**fields)
    grammar = model.service.specs[-1].sampling.grammar
    return LLMatcher(BYTES, grammar) if grammar else None


def accepts(matcher: LLMatcher | None, text: str) -> bool:
    assert matcher is not None
    token_ids = BYTES.tokenize_str(text)
    return bool(matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids))


BYTES = LLTokenizer("byte")
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["yes"]}}}


async def test_a_required_call() -> None:
    """With ``tool_choice: "required"`` the grammar allows calls of all functions, and nothing else."""
    matcher = await grammar_of(tools=TOOLS, tool_choice="required", response_format=FORMAT)
    assert accepts(matcher, LOOK)
    assert accepts(matcher, f"{GO}\n{LOOK}")
    assert not accepts(matcher, "No.")
    assert not accepts(matcher, '{"yes": 1}')


async def test_calls_of_strict_functions() -> None:
    """With ``tool_choice: "auto"`` any text is allowed, but calls of strict functions must follow their schemas."""
    strict, loose = (
        {"type": "function", "function": {**tool["function"], "strict": is_strict}}
        for tool, is_strict in zip(TOOLS, (True, False), strict=True)
    )
    matcher = await grammar_of(tools=[strict, loose])
    assert accepts(matcher, f"I look.\n{LOOK}\n{GO}\nDone.")
    assert accepts(matcher, GO.replace("{}", '{"way": 1}'))
    assert not accepts(matcher, f"I look.\n{LOOK.replace('at', 'way')}")
    assert not accepts(matcher, LOOK.replace("look", "fly"))
    assert await grammar_of(tools=[loose]) is None
    assert await grammar_of(tools=[strict], tool_choice="none") is None
    thinking = await grammar_of(THINKING, tools=[strict])
    assert accepts(thinking, f"<think>Hm</think>\n{LOOK}")
    assert not accepts(thinking, f"<think>Hm</think>\n{LOOK.replace('at', 'way')}")


async def test_calls_without_a_marker_are_not_constrained() -> None:
    """A model whose calls may begin without a marker answers requests with strict functions as any others."""
    strict: dict[str, Any] = {"type": "function", "function": {"name": "look", "strict": True}}
    assert await grammar_of(f"{TEMPLATE}{{# <|python_tag|> #}}", tools=[strict]) is None


async def test_a_named_call() -> None:
    """A named function is called once, and the answer ends with "stop", as in OpenAI's API."""
    choice = {"type": "function", "function": {"name": "look"}}
    matcher = await grammar_of(tools=TOOLS, tool_choice=choice)
    assert accepts(matcher, LOOK)
    assert not accepts(matcher, GO)
    assert not accepts(matcher, f"{LOOK}\n{LOOK}")
    (answer,) = await Model(LOOK).both(tools=TOOLS, tool_choice=choice)
    assert (calls_of(answer), answer.finish_reason) == ([("look", '{"at": "x"}')], "stop")


async def test_calls_or_an_answer_in_the_wanted_format() -> None:
    """A wanted format leaves the model free to call functions, but its answers have the format."""
    matcher = await grammar_of(tools=TOOLS, response_format=FORMAT)
    assert accepts(matcher, LOOK)
    assert accepts(matcher, '{"yes": 1}')
    assert not accepts(matcher, "No.")


async def test_thoughts_precede_the_wanted_format() -> None:
    """A model that thinks may think before an answer in the wanted format, and need not."""
    matcher = await grammar_of(THINKING, response_format=FORMAT)
    assert accepts(matcher, '<think>Hm.</think>\n\n{"yes": 1}')
    assert accepts(matcher, '{"yes": 1}')
    assert not accepts(matcher, "<think>Hm.</think>No.")


async def test_no_grammar_without_need() -> None:
    """If the model is free to call functions and to answer, nothing restricts its tokens."""
    assert await grammar_of(tools=TOOLS) is None
