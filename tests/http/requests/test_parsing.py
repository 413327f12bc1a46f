"""Parsing bodies: where the work is done."""

import json
import threading

import pytest

from actorserve.http.requests.fields import SamplingFields
from actorserve.http.requests.parsing import RequestParser
from actorserve.settings import HttpSettings


@pytest.mark.parametrize("num_chars", [10, 200_000])
async def test_unknown_fields_are_counted_on_the_loops_thread(num_chars: int) -> None:
    """A large body is parsed in another thread, but counting is not safe there."""
    counted: list[tuple[int, int]] = []
    parser = RequestParser(HttpSettings(), lambda number: counted.append((number, threading.get_ident())))
    body = {"made_up": "x" * num_chars, "also": 1, "n": 2}
    fields = await parser.parse(lambda _: SamplingFields, json.dumps(body).encode())
    assert fields.n == 2
    assert counted == [(2, threading.get_ident())]
