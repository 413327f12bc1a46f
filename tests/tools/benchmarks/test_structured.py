"""tools/bench structured: its schemas are served, and its answers are checked."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.http.structured.checker import GrammarChecker
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.grammars import Vocabulary
from tools.benchmarks.structured.decoding import Decoded, DecodingBatch
from tools.benchmarks.structured.structured import count_valid, read_schemas
from workers.engines.fake_choice import compiler_of_bytes
from workers.engines.fake_engine import FakeEngine

VOCABULARY: Vocabulary = compiler_of_bytes(256).vocabulary


def make_engine() -> FakeEngine:
    return FakeEngine(num_blocks=2048)


class BytesRequests:
    """Requests for a model whose tokens are bytes."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = texts

    def grammars(self, schemas: list[Mapping[str, Any]]) -> list[str]:
        return [json.dumps({"grammars": [{"json_schema": schema}]}) for schema in schemas]

    def spec(self, name: str, schema: Mapping[str, Any], grammar: str, seed: int, max_tokens: int) -> RequestSpec:
        return RequestSpec(name, (1, 2), SamplingParams(seed, max_tokens, stop_token_ids=(0,), grammar=grammar))

    def text(self, request: Decoded) -> str:
        return bytes(token % 256 for token in request.output if token % 256).decode()


@pytest.mark.parametrize("name", read_schemas())
async def test_every_schema_of_the_sample_is_served(name: str) -> None:
    """The gateway accepts each schema of the sample within its usual limits."""
    grammars = Grammars(GrammarChecker(lambda: VOCABULARY, cpu_s=1.0))
    assert await grammars.from_schema(read_schemas()[name], "schema")


def test_a_batch_decodes_until_each_request_has_ended() -> None:
    """A request ends with its stop token, at its limit, or when its grammar fails; the others go on."""
    lark = json.dumps({"grammars": [{"lark_grammar": 'start: "abc"'}]})
    requests = BytesRequests()
    specs = [
        requests.spec("ends", {}, lark, 1, 50),
        requests.spec("is cut", {}, "", 1, 20),
        requests.spec("fails", {}, "no grammar", 1, 50),
    ]
    batch = DecodingBatch(make_engine(), specs)
    while batch.running:
        batch.decode()
    ends, is_cut, fails = batch.requests
    assert (requests.text(ends), ends.has_ended) == ("abc", True)
    assert len(is_cut.output) == 20 or is_cut.has_ended
    assert (fails.output, fails.has_failed) == ([], True)


def test_invalid_answers_are_counted_and_shown() -> None:
    """Answers that end by themselves are read and validated; each problem names its schema."""
    schemas: dict[str, Mapping[str, Any]] = {"yes": {"const": 1}, "no": {"enum": [2]}}

    def validate(value: object, schema: Mapping[str, Any]) -> None:
        if value == 2:
            raise ValueError("two")

    num_ended, num_cut, problems = count_valid(make_engine(), BytesRequests(), schemas, 3, 2, validate)  # type: ignore[arg-type]
    assert (num_ended, num_cut) == (4, 0)
    assert problems == ["no: two in 2"] * 2
