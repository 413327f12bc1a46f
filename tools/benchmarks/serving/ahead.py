"""``tools/bench ahead``: what running one iteration ahead gains, and what it costs.

Two servers, with ``workers.run_ahead`` and without, take turns. A closed loop shows the tokens per second and the time
that the engine waits between two iterations, which comes from the worker's journal. Then requests arrive at a share of
what the slower server can serve: a request that arrives just after an iteration was planned waits for the next one, and
that is in its time to first token.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actorserve.sim.workload.requests import LengthPairs, synthetic
from actorserve.wire.journal import Entry
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.journals import between_steps_s, entries_of
from tools.benchmarks.serving import under_load
from tools.benchmarks.serving.servers import RunningServer
from tools.benchmarks.serving.statistics import Outcome
from tools.benchmarks.serving.under_load import (
    Overrides,
    make_jobs,
    poisson_arrivals,
    saturated_tokens_per_s,
    send,
    server_spec,
)
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "One iteration ahead"
_ARMS = {"ahead": True, "one by one": False}


@dataclass
class Measured:
    """One server: by round, and for TTFT and TPOT all requests of the open loops."""

    tokens_per_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each server has a turn (%(default)s)")
    under_load.add_arguments(parser, requests=48, prompts="100", outputs="100", loads="0.5")
    parser.set_defaults(concurrency=16)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError."""
    console = Console()
    machine = this_machine()
    pairs = under_load.length_pairs(arguments)
    values = under_load.overrides(arguments, "skip_join_mlfq", "proactive")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        servers = {
            arm: stack.enter_context(RunningServer(server_spec(arm, _settings(values, arm, folder), folder)))
            for arm in _ARMS
        }
        for server in servers.values():
            server.first_token_s()
        measured = {arm: Measured() for arm in _ARMS}
        for number in range(arguments.rounds):
            for arm in _in_turn(number):
                _saturate(arguments, pairs, number, servers[arm].url, _journals(folder, arm), measured[arm], console)
        slower = min(statistics.median(each.tokens_per_s) for each in measured.values())
        for load in arguments.loads:
            for number in range(arguments.rounds):
                arrivals = poisson_arrivals(pairs, arguments.requests, load * slower, arguments.seed + number)
                jobs = make_jobs(arrivals, f"{arguments.seed} {load} {number}")
                for arm in _in_turn(number):
                    _add_latencies(measured[arm], send(servers[arm].url, jobs, None, console))
    say(console, f"one worker and its clients on {machine_line(machine)}; {arguments.concurrency} requests at once")
    table = table_of(measured, arguments.rounds)
    show(table, console)
    save_figures(arguments, [table], {"settings": values}, machine)
    return 0


def table_of(measured: Mapping[str, Measured], rounds: int) -> FigureTable:
    """A row for each quantity: each server's, and the ratio of the first over the second, both medians of rounds."""
    ahead, plain = measured.values()
    rows = [_row("output tokens/s", ahead.tokens_per_s, plain.tokens_per_s)]
    rows.append(_row("wait between iterations, ms", _ms(ahead.between_s), _ms(plain.between_s)))
    for name, ours, theirs in (("TTFT", ahead.ttft_s, plain.ttft_s), ("TPOT", ahead.tpot_s, plain.tpot_s)):
        for title, pick in (("P50", statistics.median), ("P99", _p99)):
            cells = (Figure(1e3 * pick(values), rounds=rounds) for values in (ours, theirs))
            rows.append(Row(f"{name} {title}, ms", (*cells, Figure(pick(ours) / pick(theirs), rounds=rounds))))
    columns = (*(Column(arm) for arm in measured), Column("ratio", "x", 3))
    return FigureTable(TITLE, "", columns, tuple(rows))


def show(table: FigureTable, console: Console) -> None:
    shown = Table("", *(column.name for column in table.columns), title=table.title, title_justify="left")
    for row in table.rows:
        cells = [figure for figure in row.cells if figure is not None]
        shown.add_row(row.name, *(f"{cell.median:.2f}" for cell in cells[:-1]), f"{cells[-1].median:.3f}")
    print_table(console, shown)


def _settings(values: Overrides, arm: str, folder: Path) -> Overrides:
    journals = _journals(folder, arm)
    journals.mkdir()
    return values | {
        "workers": values["workers"] | {"run_ahead": _ARMS[arm]},
        "cluster": {"journal_dir": str(journals)},
    }


def _journals(folder: Path, arm: str) -> Path:
    return folder / f"journals of {arm}"


def _in_turn(number: int) -> list[str]:
    arms = list(_ARMS)
    return arms if number % 2 == 0 else arms[::-1]


def _saturate(
    arguments: argparse.Namespace,
    pairs: LengthPairs,
    number: int,
    url: str,
    journals: Path,
    measured: Measured,
    console: Console,
) -> None:
    drawn = synthetic(pairs, arguments.requests, None, arguments.seed + number)
    begun_s = time.monotonic()
    outcomes = send(url, make_jobs(drawn, f"{arguments.seed} saturation {number}"), arguments.concurrency, console)
    measured.tokens_per_s.append(saturated_tokens_per_s(outcomes))
    measured.between_s.append(between_steps_s(_since(entries_of(journals, "worker-0"), begun_s)))


def _since(entries: Iterator[Entry], begun_s: float) -> Iterator[Entry]:
    """A journal's clock is the system's monotonic one, in all processes of this machine."""
    return (entry for entry in entries if entry.now >= begun_s)


def _add_latencies(measured: Measured, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.ttft_s is not None and outcome.e2e_s is not None and outcome.output_tokens > 1:
            measured.ttft_s.append(outcome.ttft_s)
            measured.tpot_s.append((outcome.e2e_s - outcome.ttft_s) / (outcome.output_tokens - 1))


def _row(title: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    ratios = [mine / other if other else 0.0 for mine, other in zip(ours, theirs, strict=True)]
    return Row(title, tuple(map(Figure.of, (ours, theirs, ratios))))


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
