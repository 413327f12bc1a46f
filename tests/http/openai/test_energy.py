"""The energy of an answer, for clients that ask for it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from actorserve.core.effects import Deliver, End
from actorserve.core.messages import Energy, FinishReason, RequestSpec
from tests.http.fakes import ScriptedService, client_for, delivered, end

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def spending(energy: Energy | None) -> ScriptedService:
    """A service whose workers spend this on each request."""

    def script(_: RequestSpec) -> list[Deliver | End]:
        return [delivered("ab"), replace(end(FinishReason.LENGTH), energy=energy)]

    return ScriptedService(script)


async def usage(service: ScriptedService, route: str, **fields: Any) -> Any:
    async with client_for(service) as client:
        response = await client.post(f"/v1/{route}", json=fields)
    assert response.status_code == 200, response.text
    if "stream" not in fields:
        return response.json()["usage"]
    chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    return chunks[-1]["usage"]


@pytest.mark.parametrize(("route", "fields"), [("chat/completions", CHAT), ("completions", {"prompt": "ab"})])
async def test_usage_tells_the_energy_of_all_choices_when_asked(route: str, fields: dict[str, Any]) -> None:
    """The sum over the choices by phase, streamed or not; without the field there is no such word."""
    service, known = spending(Energy(1.5, 4.0)), {"prompt": 3.0, "token": 8.0}
    assert (await usage(service, route, **fields, n=2, return_energy=True))["energy_joules"] == known
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert (await usage(service, route, **fields, **options, n=2, return_energy=True))["energy_joules"] == known
    assert "energy_joules" not in await usage(service, route, **fields)


async def test_energy_that_is_not_known_is_null() -> None:
    """No number is made up, also where a stop string ended the answer before its worker told what it spent."""
    assert (await usage(spending(None), "completions", prompt="ab", return_energy=True))["energy_joules"] is None
    stopped = await usage(spending(Energy(1.0, 1.0)), "completions", prompt="ab", stop="b", return_energy=True)
    assert stopped["energy_joules"] is None
