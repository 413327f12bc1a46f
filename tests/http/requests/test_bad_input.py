"""Bad input is a 4xx in the API's format that names the field, and does not reach a worker."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from actorserve.http.requests.body import MAX_WHOLE_BODIES, SMALL_BODY_BYTES
from actorserve.settings import HttpSettings
from tests.http.fakes import CONTEXT_TOKENS, VOCAB_SIZE, ScriptedService, client_for, says
from tests.http.requests.refusals import CHAT, COMPLETION, ROUTES, Json, refused

LONG = "x" * 50_000
SHARED_PROBLEMS: list[tuple[Json, str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 10**9}, "n"),
    ({"n": 10**40}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": LONG}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"priority": "high"}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": [1]}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"priority": -(2**31) - 1}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": ["x"]}, "cache_salt"),
    ({"store": True}, "store"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": True}, "length_penalty"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"guided_regex": "("}, "structured_outputs.regex"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "param"), SHARED_PROBLEMS)
async def test_fields(route: str, fields: Json, param: str) -> None:
    """A wrong value of any field is a 400 that names the field."""
    status, error = await refused(route, json.dumps(ROUTES[route] | fields).encode())
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1] * 100_000}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "a wizard", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
async def test_chat_fields(fields: Json, param: str) -> None:
    """Fields that only chats have are checked as strictly."""
    status, error = await refused("chat/completions", json.dumps(CHAT | fields).encode())
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": 5},
        {"prompt": None},
        {"prompt": [1, "a"]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": [-1]},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [2**70]},
        {"prompt": [[1], [VOCAB_SIZE]]},
        {"prompt": ["a"] * 17},
        {"prompt": {"text": "a"}},
    ],
)
async def test_prompts(fields: Json) -> None:
    """A prompt that is empty, of a wrong type, or not of the vocabulary is a 400 that names it."""
    status, error = await refused("completions", json.dumps(COMPLETION | fields).encode())
    assert (status, error["param"]) == (400, "prompt")


async def test_choices_of_all_prompts() -> None:
    """n counts for every prompt: n times the number of prompts is bounded."""
    status, error = await refused("completions", json.dumps({"prompt": ["a", "b"], "n": 9}).encode())
    assert (status, error["param"]) == (400, "n")


@pytest.mark.parametrize("prompt", ["a" * CONTEXT_TOKENS, "a" * 4_000_000, [1] * CONTEXT_TOKENS, [1] * 1_000_000])
async def test_prompt_over_the_context(prompt: str | list[int]) -> None:
    """A prompt that fills the context is an error with the code that clients look for."""
    status, error = await refused("completions", json.dumps({"prompt": prompt}).encode())
    assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("contents", "params"),
    [
        (["a" * CONTEXT_TOKENS], {"prompt", "messages"}),
        (["a" * 4_000_000], {"messages"}),
        ([""] * (CONTEXT_TOKENS + 1), {"messages"}),
    ],
    ids=["too long", "far too long", "too many"],
)
async def test_chat_over_the_context(contents: list[str], params: set[str]) -> None:
    """A conversation that does not fit the context is an error with that code, for every way of being too long."""
    body = {"messages": [{"role": "user", "content": content} for content in contents]}
    status, error = await refused("chat/completions", json.dumps(body).encode())
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] in params


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"a": 1} trailing',
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:16]),
)
@pytest.mark.parametrize("route", ROUTES)
async def test_not_a_json_object(route: str, body: bytes) -> None:
    """A body that is not a JSON object in valid UTF-8 is a 400, also if it is deep or long."""
    status, _ = await refused(route, body)
    assert status == 400


@pytest.mark.parametrize("route", ROUTES)
async def test_many_problems(route: str) -> None:
    """An error names at most ten problems, and repeats no long name or value."""
    body = ROUTES[route] | {f"field{i}": 1 for i in range(30)} | {LONG: 1, "model": LONG}
    status, error = await refused(route, json.dumps(body).encode(), settings=HttpSettings(unknown_fields="refuse"))
    assert status == 400
    assert error["message"].count("unknown") <= 10
    assert "xxxxx" * 20 not in error["message"]
    status, error = await refused(route, json.dumps({f"field{i}": 1 for i in range(100_000)}).encode())
    assert status == 400
    assert len(error["message"]) < 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{"bogus": None}, {"stream": True, "stream_options": {"bogus": True}}])
async def test_unknown_fields_are_refused_by_setting(route: str, fields: Json) -> None:
    """With ``http.unknown_fields = "refuse"`` a field that this server does not know is a 400 that names it."""
    settings = HttpSettings(unknown_fields="refuse")
    status, error = await refused(route, json.dumps(ROUTES[route] | fields).encode(), settings=settings)
    assert (status, error["code"]) == (400, "unknown_parameter")
    assert error["param"].endswith("bogus")


@pytest.mark.parametrize("route", ROUTES)
async def test_unknown_model(route: str) -> None:
    """A model that is not served is a 404 with the code that clients look for."""
    status, error = await refused(route, json.dumps(ROUTES[route] | {"model": "gpt-9"}).encode())
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(100 * 2**20)}, 413),
        ({"content-length": "9" * 400}, 413),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-encoding": "gzip"}, 415),
    ],
)
async def test_headers(headers: dict[str, str], status: int) -> None:
    """A body that is too long, of another type or compressed is refused by its headers."""
    got, _ = await refused("completions", json.dumps(COMPLETION).encode(), headers)
    assert got == status


async def test_content_type_twice() -> None:
    """Two content types are a 400, because it is not clear which one counts."""
    service = ScriptedService()
    async with client_for(service) as client:
        headers = [("content-type", "application/json"), ("content-type", "text/plain")]
        response = await client.post("/v1/completions", content=json.dumps(COMPLETION).encode(), headers=headers)
    assert response.status_code == 400
    assert service.requests == []


async def test_body_over_the_limit() -> None:
    """A body that does not announce its length is cut off at the limit."""
    service = ScriptedService()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1_000):
            yield b"[" * 1024

    async with client_for(service, HttpSettings(max_body_bytes=4096)) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=chunks(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert service.requests == []


async def test_large_bodies_share_their_memory() -> None:
    """While large bodies use up their memory, another large one gets a 429, and a small one is answered."""
    service = says("ok")
    sent, go_on = asyncio.Semaphore(0), asyncio.Event()
    small = json.dumps(COMPLETION).encode()

    async def stalled() -> AsyncIterator[bytes]:
        yield small + b" " * (2 * SMALL_BODY_BYTES - len(small))
        sent.release()
        await go_on.wait()

    async with (
        client_for(service, HttpSettings(max_body_bytes=2 * SMALL_BODY_BYTES)) as client,
        asyncio.TaskGroup() as group,
    ):
        headers = {"content-type": "application/json"}
        waiting = [
            group.create_task(client.post("/v1/completions", content=stalled(), headers=headers))
            for _ in range(MAX_WHOLE_BODIES)
        ]
        for _ in waiting:
            await sent.acquire()
        large = await client.post("/v1/completions", content=small + b" " * SMALL_BODY_BYTES, headers=headers)
        assert (large.status_code, large.headers["retry-after"]) == (429, "1")
        assert (await client.post("/v1/completions", content=small, headers=headers)).status_code == 200
        go_on.set()
        assert {(await task).status_code for task in waiting} == {200}
        large = await client.post("/v1/completions", content=small + b" " * SMALL_BODY_BYTES, headers=headers)
        assert large.status_code == 200


async def test_no_worker_yet() -> None:
    """Before a worker is up, a valid request is a 503 that says when to retry."""
    service = ScriptedService()
    service.model = None
    async with client_for(service) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert service.requests == []
