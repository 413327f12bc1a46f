"""``tools/bench structured``: the time per token with and without a JSON schema, and whether the answers are valid."""

import argparse
import asyncio
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.errors import ActorserveError
from actorserve.http.structured.checker import GrammarChecker
from actorserve.http.structured.grammars import Grammars
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.grammars import vocabulary_of
from actorserve.model_files.locate import locate
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.arguments import add_one_engine
from tools.benchmarks.structured.decoding import Decoded, DecodingBatch
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine
from workers.engine import Engine
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kv.cache import bytes_per_token

TITLE = "Structured output: time per output token"
VALID_TITLE = "Structured output: valid answers"
SCHEMAS = Path(__file__).with_name("schemas.json")
_MAX_TOKENS = 256
_TOKENS_PER_BLOCK = 16
_MAX_PROMPT_TOKENS = 512
_LIST = {"type": "array", "minItems": 50, "items": {}}
Validate = Callable[[object, Mapping[str, Any]], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_one_engine(parser)
    parser.add_argument("--dtype", default="int8", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode together (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="iterations of a measurement (%(default)s)")
    parser.add_argument("--answers", type=int, default=2, help="answers for each schema (%(default)s)")
    add_json(parser)


def read_schemas() -> dict[str, dict[str, Any]]:
    """JSON schemas by name, in the style of JSONSchemaBench."""
    schemas: dict[str, dict[str, Any]] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    return schemas


class Requests:
    """Makes requests whose answers follow a schema, through the gateway's own grammars."""

    def __init__(self, description: ModelDescription, tokenizer: Tokenizer) -> None:
        self._description = description
        self._tokenizer = tokenizer

    def grammars(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Raises: InvalidRequestError if a schema is refused."""
        config = self._description.config
        vocabulary = partial(vocabulary_of, self._tokenizer, config.vocab_size, self._description.eos_token_ids)

        async def make() -> list[str]:
            grammars = Grammars(GrammarChecker(vocabulary, cpu_s=5.0))
            return [await grammars.from_schema(schema, "schema") for schema in schemas]

        return asyncio.run(make())

    def spec(self, name: str, schema: Mapping[str, Any], grammar: str, seed: int, max_tokens: int) -> RequestSpec:
        text = f"Write one example of JSON that follows this schema, and nothing else:\n{json.dumps(schema)}\n"
        prompt = tuple(self._tokenizer.encode(text)[:_MAX_PROMPT_TOKENS])
        stops = self._description.eos_token_ids
        sampling = SamplingParams(seed, max_tokens, temperature=0.8, top_p=0.95, stop_token_ids=stops, grammar=grammar)
        return RequestSpec(name, prompt, sampling)

    def text(self, request: Decoded) -> str:
        return self._tokenizer.decode(request.output)


def measure_tpot(
    engine: Engine, requests: Requests, schemas: Sequence[Mapping[str, Any]], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per iteration of each round, free and with a schema for each request, in turns.

    Each schema stands in a long list, so that no answer ends before the measurement.
    """
    lists = [_LIST | {"items": schema, "$defs": schema.get("$defs", {})} for schema in schemas]
    grammars = requests.grammars(lists)
    found: dict[str, list[float]] = {"free": [], "schema": []}
    for number in range(rounds + 1):
        kinds = ("free", "schema") if number % 2 else ("schema", "free")
        for kind in kinds:
            batch = DecodingBatch(
                engine,
                [
                    requests.spec(f"r{row}", schema, grammars[row] if kind == "schema" else "", number, 4 * steps)
                    for row, schema in enumerate(lists)
                ],
            )
            times = [batch.decode() for _ in range(steps) if len(batch.running) == len(lists)]
            batch.end()
            if number and times:  # the first round warms up
                found[kind].append(sum(times) / len(times))
    return found


def count_valid(
    engine: Engine,
    requests: Requests,
    schemas: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    answers: int,
    validate: Validate,
) -> tuple[int, int, list[str]]:
    """How many answers ended by themselves, how many were cut off, and the problems of those that ended."""
    grammars = dict(zip(schemas, requests.grammars(list(schemas.values())), strict=True))
    wanted = [
        (name, requests.spec(f"{name} {seed}", schema, grammars[name], seed, _MAX_TOKENS))
        for seed in range(answers)
        for name, schema in schemas.items()
    ]
    num_ended = num_cut = 0
    problems: list[str] = []
    for first in range(0, len(wanted), batch_size):
        part = wanted[first : first + batch_size]
        batch = DecodingBatch(engine, [spec for _, spec in part])
        while batch.running:
            batch.decode()
        batch.end()
        for (name, _), request in zip(part, batch.requests, strict=True):
            if request.has_failed:
                problems.append(f"{name}: its grammar failed")
            elif not request.has_ended:
                num_cut += 1
            else:
                num_ended += 1
                problem = _problem(requests.text(request), schemas[name], validate)
                if problem:
                    problems.append(f"{name}: {problem}")
    return num_ended, num_cut, problems


def _problem(text: str, schema: Mapping[str, Any], validate: Validate) -> str:
    try:
        validate(json.loads(text), schema)
    except ValueError as error:
        return f"{error} in {text[:200]}"
    return ""


def find_validator() -> Validate:
    """Raises: BenchError if the ``jsonschema`` package is missing."""
    try:
        library = importlib.import_module("jsonschema")
    except ModuleNotFoundError:
        raise BenchError("the answers are checked by the package jsonschema: install it, or actorserve[test]") from None

    def validate(value: object, schema: Mapping[str, Any]) -> None:
        error = library.exceptions.best_match(library.Draft202012Validator(schema).iter_errors(value))
        if error is not None:
            raise ValueError(error.message[:200])

    return validate


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    validate = find_validator()
    try:
        description = describe(locate(arguments.model))
        num_tokens = arguments.batch * (_MAX_PROMPT_TOKENS + max(_MAX_TOKENS, 4 * arguments.steps) + _TOKENS_PER_BLOCK)
        options = EngineOptions(
            device="cpu",
            dtype=arguments.dtype,
            num_threads=arguments.threads or machine.cores,
            tokens_per_block=_TOKENS_PER_BLOCK,
            max_batch_requests=arguments.batch,
            kv_cache_bytes=bytes_per_token(description.config, torch.float32) * num_tokens,
        )
        engine = TorchEngine(description, options)
        requests = Requests(description, load_tokenizer(description))
        schemas = read_schemas()
        chosen = [schema for _, schema in zip(range(arguments.batch), schemas.values(), strict=False)]
        times = measure_tpot(engine, requests, chosen, arguments.steps, arguments.rounds)
        valid = count_valid(engine, requests, schemas, arguments.batch, arguments.answers, validate)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    ratios = [schema_s / free_s for schema_s, free_s in zip(times["schema"], times["free"], strict=True)]
    rows = {
        "without a grammar": Figure.of([1e3 * seconds for seconds in times["free"]]),
        "with a JSON schema": Figure.of([1e3 * seconds for seconds in times["schema"]]),
    }
    num_ended, num_cut, problems = valid
    share = Figure(100 * (1 - len(problems) / max(1, num_ended)))
    say(console, f"{arguments.model}, {arguments.dtype}, batch {arguments.batch}; {machine_line(machine)}")
    table = Table("ms per output token", "median", "lowest", "highest")
    for name, figure in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in (figure.median, figure.min or 0.0, figure.max or 0.0)))
    print_table(console, table)
    say(console, f"ratio: {Figure.of(ratios).median:.3f}, the median of the rounds' own")
    say(console, f"{len(schemas)} schemas: {num_ended} answers ended by themselves, {num_cut} were cut off")
    say(console, f"valid among those that ended: {share.median:.1f} %")
    for problem in problems:
        say(console, problem)
    tables = [
        FigureTable(
            TITLE,
            f"{arguments.dtype}, batch {arguments.batch}",
            (Column("TPOT", "ms", 2), Column("ratio", "x", 3)),
            tuple(
                Row(name, (figure, Figure.of(ratios) if index else None))
                for index, (name, figure) in enumerate(rows.items())
            ),
        ),
        FigureTable(
            VALID_TITLE,
            "answers",
            (Column("ended by themselves", decimals=0), Column("valid", "%", 1)),
            (Row(f"{len(schemas)} schemas", (Figure(num_ended), share)),),
        ),
    ]
    save_figures(arguments, tables, {"cut": num_cut, "problems": problems}, machine)
    return 0
