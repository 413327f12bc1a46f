"""``/tokenize`` and ``/detokenize`` as vLLM's clients call them."""

from typing import Any

import pytest

from tests.http.fakes import CONTEXT_TOKENS, END, MODEL, TOKENIZER, VOCAB_SIZE, ScriptedService, client_for

Json = dict[str, Any]


async def post(route: str, **fields: Any) -> tuple[int, Json]:
    service = ScriptedService()
    async with client_for(service) as client:
        response = await client.post(route, json=fields)
    assert not service.requests
    return response.status_code, response.json()


async def test_a_text_and_back() -> None:
    """The tokens of a text, their names if wanted, and the text of these tokens again."""
    token_ids = TOKENIZER.encode("hello you<|end|>")
    status, answer = await post("/tokenize", model=MODEL, prompt="hello you<|end|>", return_token_strs=True)
    assert status == 200
    assert answer == {
        "count": len(token_ids),
        "max_model_len": CONTEXT_TOKENS,
        "tokens": token_ids,
        "token_strs": ["hello", "Ġ", "y", "o", "u", "<|end|>"],
    }
    status, answer = await post("/detokenize", model=MODEL, tokens=token_ids)
    assert (status, answer) == (200, {"prompt": "hello you<|end|>"})


async def test_a_chat_is_rendered() -> None:
    """Messages become the tokens of the rendered template, without an answer."""
    status, answer = await post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert status == 200
    assert TOKENIZER.decode(answer["tokens"], skip_special_tokens=False) == "<|user|>hi<|end|><|assistant|>"
    assert (answer["count"], answer["token_strs"]) == (len(answer["tokens"]), None)


async def test_nothing_has_no_tokens() -> None:
    """An empty text has no tokens, and no tokens have an empty text."""
    assert (await post("/tokenize", prompt=""))[1]["tokens"] == []
    assert (await post("/detokenize", tokens=[]))[1] == {"prompt": ""}


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "no body", "content": "x"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [END] * (CONTEXT_TOKENS + 1)}, "tokens"),
    ],
)
async def test_wrong_fields_are_refused_by_name(route: str, fields: Json, param: str) -> None:
    """A wrong value is a 400 that names its field."""
    status, answer = await post(route, **fields)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize"])
async def test_wrong_bodies_and_models_are_refused(route: str) -> None:
    """Text that is not JSON is a 400, and another model's name a 404."""
    async with client_for(ScriptedService()) as client:
        response = await client.post(route, content="{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert (await post(route, model="other", prompt="x", tokens=[1]))[0] == 404


async def test_a_text_may_be_longer_than_the_context() -> None:
    """Clients cut long texts by their tokens, so a text of several contexts is tokenized; one of many is refused."""
    async with client_for(ScriptedService()) as client:
        longer = await client.post("/tokenize", json={"prompt": "a " * CONTEXT_TOKENS})
        assert longer.status_code == 200
        assert longer.json()["count"] == 2 * CONTEXT_TOKENS
        far_longer = await client.post("/tokenize", json={"prompt": "a " * 16 * CONTEXT_TOKENS})
        assert far_longer.status_code == 400
        assert far_longer.json()["error"]["param"] == "prompt"
