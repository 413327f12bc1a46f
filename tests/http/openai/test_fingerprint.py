"""The fingerprint of an answer names the kinds of the workers that made it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import FinishReason, RequestSpec
from tests.http.fakes import ScriptedService, client_for, delivered, end

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("chat/completions", CHAT), ("completions", {"prompt": "ab"})]


def made_by(*kinds: str) -> ScriptedService:
    """A service whose requests get a token from a worker of each of these kinds, and one more."""

    def script(_: RequestSpec) -> list[Deliver | End]:
        tokens = [replace(delivered(text), kind=kind) for text, kind in zip("abcdef", kinds, strict=False)]
        return [*tokens, delivered("z"), end(FinishReason.LENGTH)]

    return ScriptedService(script)


async def ask(service: ScriptedService, route: str, **fields: Any) -> Any:
    """The whole answer, or the chunks of a stream."""
    async with client_for(service) as client:
        response = await client.post(f"/v1/{route}", json=fields)
    if "stream" not in fields:
        return response.json()
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


@pytest.mark.parametrize(("route", "fields"), ROUTES)
@pytest.mark.parametrize(
    ("kinds", "fingerprint"),
    [(("h1",), "fp_h1"), (("h1", "a1"), "fp_h1+a1"), (("h1", "h1", "a1", "h1"), "fp_h1+a1"), ((), None)],
)
async def test_an_answer_names_each_kind_once(
    route: str, fields: dict[str, Any], kinds: tuple[str, ...], fingerprint: str | None
) -> None:
    """One kind; a prompt's kind and the tokens' kind; a way back; and none that is known."""
    answer = await ask(made_by(*kinds), route, **fields, n=2)
    assert answer.get("system_fingerprint") == fingerprint


@pytest.mark.parametrize(("route", "fields"), ROUTES)
async def test_a_streams_chunks_name_both_from_the_second_kind_on(route: str, fields: dict[str, Any]) -> None:
    """Chunks before the handoff name the first kind, and those after it both."""
    chunks = await ask(made_by("h1", "a1"), route, **fields, stream=True)
    named = list(dict.fromkeys(chunk["system_fingerprint"] for chunk in chunks))
    assert named == ["fp_h1", "fp_h1+a1"] or named == ["fp_h1+a1"], "effects of one turn go out together"
    assert chunks[-1]["system_fingerprint"] == "fp_h1+a1"
