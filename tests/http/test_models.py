"""The served model's names, and what clients are told about what this server does not offer."""

import pytest
from openai import AsyncOpenAI, NotFoundError

from actorserve.core.messages import ModelInfo
from actorserve.http.app import create_app
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.not_offered import not_offered
from actorserve.settings import HttpSettings
from tests.http.fakes import DESCRIPTION, TEMPLATE, TOKENIZER, app_for, client_for, says, serving

ALIASES = ("gpt-4o", "maker/other")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
}


async def test_aliases() -> None:
    """Every name of the model is listed and has a card, and an answer repeats the name that its request gave."""
    service = says("ab")
    service.model = ModelInfo("maker/tiny", TOKENIZER.vocab_size, 64)
    template = ChatTemplate(TEMPLATE, {}, timeout_s=5.0)
    app = create_app(service, TOKENIZER, template, DESCRIPTION, HttpSettings(), aliases=ALIASES)
    async with serving(app) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        listed = [card.id async for card in client.models.list()]
        assert listed == ["maker/tiny", *ALIASES]
        for name in listed:
            card = await client.models.retrieve(name)
            assert (card.id, (card.model_extra or {})["root"]) == (name, "maker/tiny")
            chat = await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
            assert chat.model == name
            stream = await client.completions.create(model=name, prompt="x", stream=True)
            assert {chunk.model async for chunk in stream} == {name}
        with pytest.raises(NotFoundError):
            await client.models.retrieve("maker")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", [{}, {"model": ""}, {"model": None}])
async def test_no_name_means_the_served_model(path: str, given: dict[str, str | None]) -> None:
    """A request without a model, or with an empty one, gets the served model's own name in its answer."""
    async with client_for(says("ab")) as client:
        assert (await client.post(path, json=BODIES[path] | given)).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/moderations", "moderation"),
        ("POST", "/v1/rerank", "reranking"),
        ("POST", "/score", "scoring"),
        ("GET", "/v1/fine_tuning/jobs", "fine-tuning"),
        ("GET", "/v1/files/file-1/content", "files"),
        ("DELETE", "/v1/batches/batch_1", "batches"),
        ("GET", "/v1/assistants", "assistants"),
        ("POST", "/v1/realtime/sessions", "realtime"),
    ],
)
async def test_what_is_not_offered(method: str, path: str, word: str) -> None:
    """A route of other servers is answered with 404, which SDKs do not retry, and a text that says what is missing."""
    async with client_for(says("ab")) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "not_offered")
    assert f"does not offer {word}" in error["message"]


async def test_the_sdk_says_what_is_not_offered() -> None:
    """OpenAI's SDK raises an error with our text, without a retry."""
    async with serving(app_for(says("ab"))) as (url, _), AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        with pytest.raises(NotFoundError, match="does not offer embeddings"):
            await client.embeddings.create(model="tiny", input="x")


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/filesystem", "/v1/nothing/embeddings", "/v1/" + "x/" * 10_000])
def test_other_paths_are_unknown(path: str) -> None:
    """Only whole segments at the beginning of a path count."""
    assert not_offered(path) is None
