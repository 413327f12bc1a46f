"""The ids of an answer's tokens and of its prompt's, for clients that train on them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RequestSpec
from actorserve.settings import HttpSettings
from tests.http.fakes import END, TOKENIZER, ScriptedService, client_for, deliver, end, one_by_one, says

Json = dict[str, Any]
TEXT = "hé hello"
IDS = TOKENIZER.encode(TEXT)
CHAT: Json = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: Json = {"prompt": ["ab", "hello"]}


def stops() -> ScriptedService:
    """A service whose model writes ``TEXT`` and the token that ends an answer."""

    def script(_: RequestSpec) -> Iterator[Deliver | End]:
        yield from one_by_one(TEXT)[:-1]
        yield deliver([END])
        yield end(FinishReason.STOP)

    return ScriptedService(script)


async def ask(service: ScriptedService, route: str, settings: HttpSettings | None = None, **fields: Any) -> Any:
    """The whole answer, or the chunks of a stream."""
    async with client_for(service, settings) as client:
        response = await client.post(f"/v1/{route}", json=fields)
    if "stream" not in fields:
        return response.json()
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


async def test_a_completion_tells_the_ids_of_each_prompt_and_choice() -> None:
    """The token that ended a choice is among them, although it has no text, and an echoed prompt is not."""
    service = stops()
    answer = await ask(service, "completions", **COMPLETION, n=2, echo=True, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*IDS, END]] * 4
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [TOKENIZER.encode(prompt) for prompt in ("ab", "ab", "hello", "hello")]
    assert answer["choices"][0]["logprobs"] is None


async def test_the_best_completions_have_their_own_prompts() -> None:
    """Of the best of several, each has the ids of its own prompt."""
    answer = await ask(stops(), "completions", **COMPLETION, best_of=3, n=1, return_token_ids=True)
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [TOKENIZER.encode("ab"), TOKENIZER.encode("hello")]


async def test_a_streamed_completion_tells_the_same_ids() -> None:
    """The prompt's ids stand in the first chunk of each choice, and the chunks' ids are those of the whole answer."""
    chunks = await ask(stops(), "completions", **COMPLETION, stream=True, return_token_ids=True)
    for index, prompt in enumerate(("ab", "hello")):
        first, *rest = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["prompt_token_ids"] == TOKENIZER.encode(prompt)
        assert all("prompt_token_ids" not in choice for choice in rest)
        assert [token_id for choice in (first, *rest) for token_id in choice["token_ids"]] == [*IDS, END]


async def test_a_chat_tells_the_ids_of_its_prompt_once() -> None:
    """The prompt's ids belong to the answer, and the others to the choices; no log-probabilities come with them."""
    service = stops()
    answer = await ask(service, "chat/completions", **CHAT, n=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == list(service.specs[0].prompt_token_ids)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*IDS, END]] * 2
    assert answer["choices"][0]["logprobs"] is None


async def test_a_streamed_chat_tells_the_same_ids() -> None:
    """The prompt's ids stand in the first chunk alone, and the chunks' ids are those of the whole answer."""
    service = stops()
    first, *rest = await ask(service, "chat/completions", **CHAT, stream=True, return_token_ids=True)
    assert first["prompt_token_ids"] == list(service.specs[0].prompt_token_ids)
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    assert [token_id for chunk in rest for token_id in chunk["choices"][0]["token_ids"]] == [*IDS, END]


@pytest.mark.parametrize(("route", "fields"), [("chat/completions", CHAT), ("completions", COMPLETION)])
async def test_ids_come_only_if_they_are_wanted(route: str, fields: Json) -> None:
    """Whole answers have null in their places, as vLLM's, and chunks do not have the fields."""
    answer = await ask(says("ok"), route, **fields)
    holder = answer if route == "chat/completions" else answer["choices"][0]
    assert (holder["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None, None)
    for chunk in await ask(says("ok"), route, **fields, stream=True):
        assert "token_ids" not in chunk["choices"][0]


async def test_ids_of_prompts_count_as_their_log_probabilities_do() -> None:
    """More of them than an answer may hold are a 400 that names the field."""
    fields = {"prompt": "a" * 40, "n": 3, "return_token_ids": True}
    settings = HttpSettings(max_prompt_logprobs=100)
    answer = await ask(says("ok"), "completions", settings, **fields)
    assert answer["error"]["param"] == "return_token_ids"
