"""Whole and streamed answers, as clients of this API read them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, ModelInfo, RefusalReason, RequestSpec
from actorserve.core.rng import derive_seed
from tests.http.fakes import (
    CONTEXT_TOKENS,
    END,
    MODEL,
    TOKENIZER,
    ScriptedService,
    client_for,
    delivered,
    end,
    one_by_one,
    refuses,
    says,
)

Json = dict[str, Any]
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


async def ask(service: ScriptedService, route: str, **fields: Any) -> Json:
    async with client_for(service) as client:
        response = await client.post(f"/v1/{route}", json=fields)
    assert response.status_code == 200, response.text
    assert all(request.released.is_set() for request in service.requests)
    answer: Json = response.json()
    return answer


async def stream(service: ScriptedService, route: str, **fields: Any) -> list[Json | str]:
    """The data of every event, parsed except for ``[DONE]``."""
    async with client_for(service) as client:
        response = await client.post(f"/v1/{route}", json=fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(request.released.is_set() for request in service.requests)
    *events, nothing = response.text.split("\n\n")
    assert nothing == ""
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_chat() -> None:
    """A chat's prompt is the rendered template, and its answer has text, finish reason and usage."""
    service = ScriptedService(lambda _: [delivered("good day"), delivered("<|end|>"), end(FinishReason.STOP)])
    answer = await ask(service, "chat/completions", messages=MESSAGES, model=MODEL)
    (spec,) = service.specs
    prompt = "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>"
    assert TOKENIZER.decode(spec.prompt_token_ids, skip_special_tokens=False) == prompt
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "good day", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    num_prompt_tokens = len(spec.prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": num_prompt_tokens + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_chat_stream() -> None:
    """A stream has the role, then text, then the finish reason, then the end, and no chunk is empty."""
    events = await stream(says("h€y"), "chat/completions", messages=MESSAGES)
    assert events.pop() == "[DONE]"
    assert all(isinstance(event, dict) and event["object"] == "chat.completion.chunk" for event in events)
    choices = [event["choices"][0] for event in events if isinstance(event, dict)]
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": "€"}, None),
        ({"content": "y"}, None),
        ({}, "length"),
    ]
    assert len({event["id"] for event in events if isinstance(event, dict)}) == 1
    assert all("usage" not in event for event in events)


async def test_stream_with_usage() -> None:
    """With include_usage the last chunk has the usage and no choice, and the other chunks have a null."""
    events = await stream(
        says("abc"), "completions", prompt="xy", n=2, stream_options={"include_usage": True}, max_tokens=9
    )
    assert events[-1] == "[DONE]"
    last = events[-2]
    assert isinstance(last, dict)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(isinstance(event, dict) and event["usage"] is None for event in events[:-2])


async def test_stream_with_usage_in_every_chunk() -> None:
    """With continuous_usage_stats every chunk has the number of tokens generated so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(says("abc"), "completions", prompt="xy", stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events if isinstance(event, dict)]
    assert counts == [1, 2, 3, 3, 3]
    events = await stream(says("abc"), "chat/completions", messages=MESSAGES, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events if isinstance(event, dict)]
    assert counts == [0, 1, 2, 3, 3, 3], "the chunk with the role comes before the tokens"


@pytest.mark.parametrize("wanted", [{}, {"stop": "z"}, {"stop": "bc"}])
async def test_usage_tells_what_was_cached(wanted: Json) -> None:
    """Usage has the cached tokens that every prompt's first choice found, for all ways in which an answer ends."""

    def script(spec: RequestSpec) -> list[Deliver | End]:
        first, *rest = one_by_one("abcd")
        assert isinstance(first, Deliver)
        return [replace(first, num_cached_tokens=10 ** int(spec.request_id[-1])), *rest]

    fields = {"prompt": ["pq", "qr"], "n": 2} | wanted
    answer = await ask(ScriptedService(script), "completions", **fields)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 101}
    options = {"include_usage": True}
    *_, last, _ = await stream(ScriptedService(script), "completions", **fields, stream_options=options)
    assert isinstance(last, dict)
    assert last["usage"] == answer["usage"]


@pytest.mark.parametrize(
    ("route", "asked"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})]
)
async def test_the_cache_salt_reaches_the_worker(route: str, asked: Json) -> None:
    """All choices' requests have the client's salt, or none if the client gave none."""
    service = says("a")
    await ask(service, route, **asked, n=2, cache_salt="tenant-1")
    await ask(service, route, **asked, cache_salt=None)
    await ask(service, route, **asked)
    assert [spec.cache_salt for spec in service.specs] == ["tenant-1", "tenant-1", "", ""]


async def test_completion_stream() -> None:
    """A completion's stream has text from its first chunk on."""
    events = await stream(says("ab"), "completions", prompt="xy")
    choices = [event["choices"][0] for event in events if isinstance(event, dict)]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]


async def test_choices() -> None:
    """The choices of several prompts come in the order of prompts, each with its own seed."""

    def script(spec: RequestSpec) -> list[Any]:
        return one_by_one(f"{TOKENIZER.decode(spec.prompt_token_ids)}{spec.request_id[-1]}")

    service = ScriptedService(script)
    answer = await ask(service, "completions", prompt=["p", "q"], n=2, seed=-5)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "p0"),
        (1, "p1"),
        (2, "q2"),
        (3, "q3"),
    ]
    assert len({spec.request_id for spec in service.specs}) == 4
    seed = 2**64 - 5
    assert [spec.sampling.seed for spec in service.specs] == [derive_seed(seed, i) for i in (0, 1, 0, 1)]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_interleaved_choices() -> None:
    """Choices of a stream are interleaved as they come, and each begins with its role."""
    texts = {"0": "abc", "1": "xyz"}
    service = ScriptedService(lambda spec: one_by_one(texts[spec.request_id[-1]]))
    events = await stream(service, "chat/completions", messages=MESSAGES, n=2)
    order = [event["choices"][0]["index"] for event in events if isinstance(event, dict)]
    assert order != sorted(order)
    for index, text in enumerate(("abc", "xyz")):
        deltas = [
            event["choices"][0]["delta"]
            for event in events
            if isinstance(event, dict) and event["choices"][0]["index"] == index
        ]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == text


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_string_releases(streamed: bool) -> None:
    """A stop string across tokens ends the answer before it, and the worker is told at once."""
    service = ScriptedService(lambda _: [delivered("one T"), delivered("WO three")])
    fields = {"prompt": "x", "stop": [" TW"], "max_tokens": 50}
    if streamed:
        events = await stream(service, "completions", **fields)
        choices = [event["choices"][0] for event in events if isinstance(event, dict)]
        text = "".join(choice["text"] for choice in choices)
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = (await ask(service, "completions", **fields))["choices"]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("one", "stop")


async def test_effects_after_a_stop_string_are_dropped() -> None:
    """Effects that are in the stream when a stop string ends their choice do not reach the client."""
    service = ScriptedService()
    asking = asyncio.create_task(ask(service, "completions", prompt="x", stop="b", n=2))
    second = await service.request(1)
    service.requests[0].feed_at_once([delivered("ab"), delivered("c"), end(FinishReason.LENGTH)])
    second.feed_at_once(one_by_one("xyz"))
    answer = await asking
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("a", "stop"),
        ("xyz", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 5


async def test_chat_logprobs() -> None:
    """A token of a chat has its log-probability, its bytes, and the best other tokens."""
    service = ScriptedService(lambda _: [delivered("h€", -0.5), end(FinishReason.LENGTH)])
    answer = await ask(service, "chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert service.specs[0].sampling.top_logprobs == 2
    content = answer["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["h", "�", "�", "�"]
    assert bytes(byte for token in content for byte in token["bytes"]) == "h€".encode()
    assert {token["logprob"] for token in content} == {-0.5}
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -7.0]
    events = await stream(service, "chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2)
    streamed = [
        token
        for event in events
        if isinstance(event, dict) and event["choices"][0]["logprobs"]
        for token in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


async def test_completion_logprobs() -> None:
    """A completion's log-probabilities are columns, with offsets into its text; minus infinity is a number."""
    service = ScriptedService(lambda _: [delivered("hello w", float("-inf")), end(FinishReason.LENGTH)])
    answer = await ask(service, "completions", prompt="x", logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 5, 6],
        "tokens": ["hello", " ", "w"],
        "token_logprobs": [-9999.0] * 3,
        "top_logprobs": [{token: -9999.0, "<|end|>": -7.0} for token in ("hello", " ", "w")],
    }


async def test_sampling_defaults() -> None:
    """By default a completion has 16 tokens, a chat as many as fit the context, and the gateway draws the seed."""
    service = says("a")
    await ask(service, "completions", prompt=[1, 2, 3])
    await ask(service, "chat/completions", messages=MESSAGES)
    first, second = service.specs
    assert first.prompt_token_ids == (1, 2, 3)
    assert first.sampling.max_tokens == 16
    assert second.sampling.max_tokens == CONTEXT_TOKENS - len(second.prompt_token_ids)
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.stop_token_ids == (END,)
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_logprobs) == (1.0, 0, -1)


async def test_default_length_fits() -> None:
    """The default of 16 tokens is cut if the context has less space."""
    service = says("a")
    await ask(service, "completions", prompt=[1] * (CONTEXT_TOKENS - 4))
    assert service.specs[0].sampling.max_tokens == 4


async def test_sampling_fields() -> None:
    """Every sampling field reaches the worker."""
    service = says("a")
    fields: Json = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "3": 2},
        "stop_token_ids": [9, 4],
        "ignore_eos": True,
        "min_tokens": 2,
        "seed": 11,
        "priority": -3,
        "user": "somebody",
        "n": None,
    }
    await ask(service, "chat/completions", messages=MESSAGES, max_completion_tokens=5, **fields)
    (spec,) = service.specs
    sampling = spec.sampling
    assert spec.priority == -3
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (11, 5, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert sampling.logit_bias == ((3, 2.0), (7, -100.0))
    assert sampling.stop_token_ids == (4, 9)


async def test_tiny_temperature_is_greedy() -> None:
    """A temperature that would overflow the logits is greedy."""
    service = says("a")
    await ask(service, "completions", prompt="x", temperature=1e-300)
    assert service.specs[0].sampling.temperature == 0.0


async def test_text_parts_and_developers() -> None:
    """Text parts are joined by line breaks, and a developer message becomes a system message."""
    service = says("a")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await ask(service, "chat/completions", messages=[{"role": "developer", "content": parts}])
    prompt = TOKENIZER.decode(service.specs[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|system|>one\ntwo<|end|><|assistant|>"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "retry_after"),
    [
        (RefusalReason.OVERLOADED, 429, "3"),
        (RefusalReason.NO_INSTANCE, 503, "3"),
        (RefusalReason.DRAINING, 503, "3"),
        (RefusalReason.TOO_LARGE, 400, None),
    ],
)
async def test_refusals(streamed: bool, reason: RefusalReason, status: int, retry_after: str | None) -> None:
    """A refused request is an HTTP error, streamed or not, that says when to retry."""
    service = refuses(reason)
    async with client_for(service) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "stream": streamed, "n": 2})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert all(request.released.is_set() for request in service.requests)


async def test_failure_before_any_token() -> None:
    """A request whose grammar meets a limit before anything was sent is a 400, because a retry cannot help."""
    service = ScriptedService(lambda _: [end(FinishReason.ERROR)])
    async with client_for(service) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_grammar"


async def test_failure_in_mid_stream() -> None:
    """A stream that fails in the middle ends with the error as an event, and then with [DONE]."""
    service = ScriptedService()
    streaming = asyncio.create_task(stream(service, "completions", prompt="x"))
    request = await service.request()
    request.feed([delivered("abc")])
    await request.taken(1)
    request.feed([end(FinishReason.ERROR)])
    events = await streaming
    assert events[-1] == "[DONE]"
    error = events[-2]
    assert isinstance(error, dict)
    assert error["error"]["code"] == "invalid_grammar"


async def test_abort() -> None:
    """An aborted request has the text so far, and the abort as its finish reason."""
    answer = await ask(says("ab", FinishReason.ABORT), "completions", prompt="x")
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "abort")


async def test_models() -> None:
    """The served model is listed with its context, and found by its name, even if that has slashes."""
    service = ScriptedService()
    service.model = ModelInfo("maker/tiny", 10, 64)
    async with client_for(service) as client:
        listed = (await client.get("/v1/models")).json()
        card = (await client.get("/v1/models/maker/tiny")).json()
        missing = await client.get("/v1/models/other")
    assert listed == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == ("maker/tiny", "model", 64)
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_models_before_a_worker() -> None:
    """Before a worker is up, no model is listed."""
    service = ScriptedService()
    service.model = None
    async with client_for(service) as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
