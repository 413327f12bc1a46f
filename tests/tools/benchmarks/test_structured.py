"""tools/bench structured: its schemas are served, and its answers are checked."""

import json
from collections.abc import Mapping
from typing import Any

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.errors import InvalidRequestError
from actorserve.http.structured.checker import GrammarChecker
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.grammars import Vocabulary
from tools.benchmarks.structured.decoding import Decoded, DecodingBatch
from tools.benchmarks.structured.structured import Validity, count_valid, find_validator, read_schemas
from workers.engines.fake_choice import compiler_of_bytes
from workers.engines.fake_engine import FakeEngine

VOCABULARY: Vocabulary = compiler_of_bytes(256).vocabulary


def make_engine() -> FakeEngine:
    return FakeEngine(num_blocks=2048)


class BytesRequests:
    """Requests for a model whose tokens are bytes."""

    def __init__(self, grammars: Mapping[str, str]) -> None:
        self._grammars = grammars

    def grammars(self, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        return {name: self._grammars[name] for name in schemas if name in self._grammars}

    def spec(self, name: str, schema: Mapping[str, Any], grammar: str, seed: int, max_tokens: int) -> RequestSpec:
        return RequestSpec(name, (1, 2), SamplingParams(seed, max_tokens, stop_token_ids=(0,), grammar=grammar))

    def text(self, request: Decoded) -> str:
        return bytes(token % 256 for token in request.output if token % 256).decode()


REFUSED = {
    "Unknown format": 8,
    "Unimplemented keys": 11,
    "oneOf": 4,
}
"""How many schemas of the sample are refused, by what the refusal names."""


async def test_every_answer_that_ends_by_itself_is_valid() -> None:
    """A schema of the sample is served, or refused by name; random answers that end are valid for their schema."""
    schemas, validate = read_schemas(), find_validator()
    grammars = Grammars(GrammarChecker(lambda: VOCABULARY, cpu_s=1.0))
    served: dict[str, str] = {}
    refusals: list[str] = []
    for name, schema in schemas.items():
        try:
            served[name] = await grammars.from_schema(schema, "schema")
        except InvalidRequestError as refusal:
            refusals.append(str(refusal))
    assert {reason: sum(reason in refusal for refusal in refusals) for reason in REFUSED} == REFUSED
    assert len(served) == len(schemas) - sum(REFUSED.values())
    valid = count_valid(make_engine(), BytesRequests(served), schemas, 16, 2, validate)  # type: ignore[arg-type]
    assert (valid.num_schemas, valid.num_served, valid.problems) == (len(schemas), len(served), ())
    assert valid.num_ended > len(served)


def test_a_batch_decodes_until_each_request_has_ended() -> None:
    """A request ends with its stop token, at its limit, or when its grammar fails; the others go on."""
    lark = json.dumps({"grammars": [{"lark_grammar": 'start: "abc"'}]})
    requests = BytesRequests({})
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

    requests = BytesRequests(
        {name: json.dumps({"grammars": [{"json_schema": schema}]}) for name, schema in schemas.items()}
    )
    found = count_valid(make_engine(), requests, schemas, 3, 2, validate)  # type: ignore[arg-type]
    assert found == Validity(2, 2, 4, 0, ("no: two in 2",) * 2)
