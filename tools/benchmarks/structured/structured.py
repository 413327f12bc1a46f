"""``tools/bench structured``: the time per token with and without a JSON schema, and whether the answers are valid."""

import argparse
import asyncio
import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec, SamplingParams
from actorserve.errors import ActorserveError, InvalidRequestError
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
_MAX_TOKENS = 200
_TOKENS_PER_BLOCK = 16
_MAX_PROMPT_TOKENS = 128
_LIST = {"type": "array", "minItems": 50, "items": {}}
Validate = Callable[[object, Mapping[str, Any]], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_one_engine(parser)
    parser.add_argument("--dtype", default="int8", help="numeric mode of the engine (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode together (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="iterations of a measurement (%(default)s)")
    parser.add_argument("--answers", type=int, default=1, help="answers for each schema (%(default)s)")
    add_json(parser)


def read_schemas() -> dict[str, dict[str, Any]]:
    """The sample of JSONSchemaBench's schemas, by name."""
    schemas: dict[str, dict[str, Any]] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    return schemas


@dataclass(frozen=True, slots=True)
class Validity:
    """How many schemas there are, how many are served, how many answers ended by themselves, how many were cut off at
    their limit, and what is wrong with the answers that ended, or with grammars that failed.
    """

    num_schemas: int
    num_served: int
    num_ended: int
    num_cut: int
    problems: tuple[str, ...]


class Requests:
    """Makes requests whose answers follow a schema, through the gateway's own grammars."""

    def __init__(self, description: ModelDescription, tokenizer: Tokenizer) -> None:
        self._description = description
        self._tokenizer = tokenizer

    def grammars(self, schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """The grammars of the schemas that are served, by name."""
        config = self._description.config
        vocabulary = partial(vocabulary_of, self._tokenizer, config.vocab_size, self._description.eos_token_ids)

        async def make() -> dict[str, str]:
            grammars = Grammars(GrammarChecker(vocabulary, cpu_s=1.0))
            found = {}
            for name, schema in schemas.items():
                with suppress(InvalidRequestError):
                    found[name] = await grammars.from_schema(schema, "schema")
            return found

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
    engine: Engine,
    requests: Requests,
    schemas: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    steps: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds per iteration of each round, free and with a schema for each request, in turns.

    Each schema stands in a long list, so that no answer ends before the measurement. Raises: BenchError if too few
    schemas can stand there.
    """
    lists = {name: _LIST | {"items": schema} for name, schema in schemas.items() if "$ref" not in json.dumps(schema)}
    grammars = dict(islice(requests.grammars(lists).items(), batch_size))
    if len(grammars) < batch_size:
        raise BenchError(f"--batch {batch_size}: only {len(grammars)} schemas of the sample can be measured")
    found: dict[str, list[float]] = {"free": [], "schema": []}
    for number in range(rounds + 1):
        kinds = ("free", "schema") if number % 2 else ("schema", "free")
        for kind in kinds:
            batch = DecodingBatch(
                engine,
                [
                    requests.spec(name, lists[name], grammar if kind == "schema" else "", number, 4 * steps)
                    for name, grammar in grammars.items()
                ],
            )
            times = [batch.decode() for _ in range(steps) if len(batch.running) == batch_size]
            batch.end()
            if number and times:  # the first round warms up
                found[kind].append(median(times))
    return found


def count_valid(
    engine: Engine,
    requests: Requests,
    schemas: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    answers: int,
    validate: Validate,
) -> Validity:
    """Let the model answer each schema that is served, and check the answers that end by themselves."""
    grammars = requests.grammars(schemas)
    wanted = [
        (name, requests.spec(f"{name} {seed}", schemas[name], grammar, seed, _MAX_TOKENS))
        for seed in range(answers)
        for name, grammar in grammars.items()
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
    return Validity(len(schemas), len(grammars), num_ended, num_cut, tuple(problems))


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
        kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        error = library.exceptions.best_match(validator.iter_errors(value))
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
        times = measure_tpot(engine, requests, schemas, arguments.batch, arguments.steps, arguments.rounds)
        valid = count_valid(engine, requests, schemas, arguments.batch, arguments.answers, validate)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    ratios = [schema_s / free_s for schema_s, free_s in zip(times["schema"], times["free"], strict=True)]
    rows = {
        "without a grammar": Figure.of([1e3 * seconds for seconds in times["free"]]),
        "with a JSON schema": Figure.of([1e3 * seconds for seconds in times["schema"]]),
    }
    share = Figure(100 * (1 - len(valid.problems) / max(1, valid.num_ended)))
    say(console, f"{arguments.model}, {arguments.dtype}, batch {arguments.batch}; {machine_line(machine)}")
    table = Table("ms per output token", "median", "lowest", "highest")
    for name, figure in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in (figure.median, figure.min or 0.0, figure.max or 0.0)))
    print_table(console, table)
    say(console, f"ratio: {Figure.of(ratios).median:.3f}, the median of the rounds' own")
    say(
        console,
        f"{valid.num_served} of {valid.num_schemas} schemas are served: {valid.num_ended} answers ended by themselves, "
        f"{valid.num_cut} were cut off",
    )
    say(console, f"valid among those that ended: {share.median:.1f} %")
    for problem in valid.problems:
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
            (Column("served", decimals=0), Column("ended by themselves", decimals=0), Column("valid", "%", 1)),
            (Row(f"{valid.num_schemas} schemas", (Figure(valid.num_served), Figure(valid.num_ended), share)),),
        ),
    ]
    save_figures(arguments, tables, {"cut": valid.num_cut, "problems": valid.problems}, machine)
    return 0
