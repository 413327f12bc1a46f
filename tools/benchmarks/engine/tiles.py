"""``tools/bench tiles``: what batch-independent bits cost in the float modes.

Row tiles (``workers.kernels.tiles``) make a token's bits independent of its batch. Every iteration is also timed
without tiles, in turn with the real one: all rows in one call, whose bits depend on the batch.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from actorserve.core.messages import RequestSpec, SamplingParams, StepPlan
from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.arguments import add_one_engine
from tools.figures.figure import Column, Figure, FigureTable, Row as FigureRow
from tools.figures.machine import machine_line, this_machine
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kernels.tiles import RowFunction, RowTiles

TITLE = "Time of an iteration with and without row tiles"
CONTEXT_TOKENS = 150
DECODE_REQUESTS = (1, 4, 8, 16, 17, 32)
PREFILL_TOKENS = (128, 512)


@dataclass(frozen=True, slots=True)
class Row:
    """One shape's iteration with tiles and without. ``cost`` is the ratio of both times."""

    shape: str
    tokens: int
    step_ms: Figure
    untiled_step_ms: Figure

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.step_ms.median

    @property
    def cost(self) -> float:
        return self.step_ms.median / self.untiled_step_ms.median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_one_engine(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="the modes with tiles")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_json(parser)


class Untiled(RowTiles):
    """All rows at once, whatever their number."""

    def __init__(self) -> None:
        super().__init__((1,), 0)

    def run(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)


def _plan(step_id: int, num_requests: int, start: int, num_tokens: int, engine: TorchEngine) -> StepPlan:
    blocks = -(-(start + num_tokens) // engine.tokens_per_block) * engine.layer_groups.num_groups
    return StepPlan(
        step_id=step_id,
        request_ids=tuple(f"r{i}" for i in range(num_requests)),
        starts=(start,) * num_requests,
        token_ids=(tuple(range(100, 100 + num_tokens)),) * num_requests,
        block_tables=tuple(tuple(range(i * blocks, (i + 1) * blocks)) for i in range(num_requests)),
        samples=(True,) * num_requests,
    )


def _measure(engine: TorchEngine, shape: str, plan: StepPlan, rounds: int) -> Row:
    tiles = engine.layer_tiles, engine.head_tiles
    untiled = Untiled(), Untiled()
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for tiled in (True, False) if number % 2 else (False, True):
            engine.layer_tiles, engine.head_tiles = tiles if tiled else untiled
            began = time.perf_counter()
            engine.begin(plan).result()
            if number > 0:  # the first round warms up
                times[tiled].append(1e3 * (time.perf_counter() - began))
    engine.layer_tiles, engine.head_tiles = tiles
    tokens = sum(len(ids) for ids in plan.token_ids)
    return Row(shape, tokens, Figure.of(times[True]), Figure.of(times[False]))


def measure(engine: TorchEngine, rounds: int, console: Console) -> list[Row]:
    """All shapes: decode steps at a context of 150 tokens, and prefills of one prompt."""
    for i in range(max(DECODE_REQUESTS)):
        prompt = tuple(range(100, 100 + CONTEXT_TOKENS))
        engine.add(RequestSpec(f"r{i}", prompt, SamplingParams(seed=0, max_tokens=1000, temperature=0.0)))
    plans = [(f"decode {n}", _plan(n, n, CONTEXT_TOKENS, 1, engine)) for n in DECODE_REQUESTS] + [
        (f"prefill {n}", _plan(n, 1, 0, n, engine)) for n in PREFILL_TOKENS
    ]
    for _, plan in plans[: len(DECODE_REQUESTS)]:
        # A decode step attends to KV, so its context must be computed first.
        engine.begin(_plan(0, len(plan.request_ids), 0, CONTEXT_TOKENS + 1, engine)).result()
    return [
        _measure(engine, shape, plan, rounds)
        for shape, plan in track(plans, "measuring", console=console, transient=True)
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("iteration", "ms", "tokens/s", "ms without tiles", "with / without")
    for row in rows:
        table.add_row(
            row.shape,
            f"{row.step_ms.median:.1f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.untiled_step_ms.median:.1f}",
            f"{row.cost:.2f}x",
        )
    print_table(console, table)


def table_of(rows: Sequence[Row]) -> FigureTable:
    columns = (Column("with tiles", "ms"), Column("without", "ms"), Column("with / without", "x", 2))
    return FigureTable(
        TITLE,
        "iteration",
        columns,
        tuple(FigureRow(row.shape, (row.step_ms, row.untiled_step_ms, Figure(row.cost))) for row in rows),
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    machine = this_machine(gpu=gpu)
    num_threads = arguments.threads or machine.cores
    try:
        description = describe(locate(arguments.model))
        engine = TorchEngine(
            description,
            EngineOptions(
                device=arguments.device, dtype=arguments.dtype, num_threads=num_threads, kv_cache_bytes=2**30
            ),
        )
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    rows = measure(engine, arguments.rounds, console)
    say(console, f"{description.name}, {arguments.dtype}, {num_threads} threads; {machine_line(machine)}")
    show(rows, console)
    save_figures(arguments, [table_of(rows)], {"dtype": arguments.dtype, "num_threads": num_threads}, machine)
    return 0
