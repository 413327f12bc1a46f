"""``tools/simulate CONFIG``: run an experiment in virtual time, show it, write JSON and plots."""

import argparse
import os
import signal
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from actorserve.errors import ActorserveError, ProtocolError, SimulationError
from actorserve.wire.replay import replay
from tools.figures.files import command_line, measured_now, write_figures
from tools.profiling.output import prepare_file
from tools.simulation import runner
from tools.simulation.experiment import Experiment, merged, read_experiment
from tools.simulation.report import JSON_NAME, as_values, show, write_json
from tools.simulation.runner import run_experiment

EXIT_DIFFERENT = 1  # a replayed core gave other effects
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
MIN_WIDTH = 130  # columns of the tables: a narrow terminal wraps them, which is better than cutting them off


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/simulate", description="Simulate a cluster in virtual time, with the production schedulers."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "config", type=Path, nargs="?", help="a file that describes an experiment; examples are in config/simulations"
    )
    what.add_argument(
        "--replay",
        type=Path,
        metavar="JOURNAL",
        help="replay a journal of a real process (see cluster.journal_dir), and compare the effects",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the JSON file and the plots (default: simulated/NAME)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures that READMEs show to this file")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="how many runs are simulated at once (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a value of the file, such as seed=2 or cluster.instances=4; may be repeated",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    parsed.command_line = command_line("tools/simulate", sys.argv[1:] if arguments is None else arguments)
    if parsed.processes < 1:
        parser.error("--processes must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_experiment_file(parsed) if parsed.replay is None else run_replay(parsed.replay)
    except ActorserveError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except OSError as error:
        print(f"simulate: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("simulate: interrupted; nothing is written", file=sys.stderr)
        return EXIT_INTERRUPTED


def run_replay(journal: Path) -> int:
    """Returns 0 if a fresh core gives the same effects. Raises: ActorserveError."""
    try:
        with journal.open("rb") as file:
            result = replay(file)
    except OSError as error:
        raise SimulationError(f"cannot read {journal}: {error.strerror or error}") from None
    except ProtocolError as error:
        raise SimulationError(f"{journal}: {error}") from None
    told = f"{journal.name}: {result.num_entries} inputs over {result.duration_s:.3f} s"
    if result.difference is not None:
        print(f"{told}: {result.difference}")
        return EXIT_DIFFERENT
    print(f"{told}, {result.num_compared} of them compared: equal effects")
    return 0


def run_experiment_file(parsed: argparse.Namespace) -> int:
    """Raises: ActorserveError, OSError."""
    overrides: dict[str, Any] = {}
    for text in parsed.set:
        overrides = merged(overrides, parse_override(text))
    experiment = read_experiment(parsed.config, overrides)
    folder = parsed.out or Path("simulated") / experiment.name
    prepare_file(folder / JSON_NAME)
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    began_s = time.perf_counter()
    with _ProgressLines(experiment) as lines:
        results = run_experiment(experiment, min(parsed.processes, len(experiment.cases)), lines.report)
    took_s = time.perf_counter() - began_s
    values = as_values(experiment, results)
    show(values, console)
    num_requests = sum(figures["requests"]["arrived"] for result in results for figures in result.runs.values())
    console.print(f"{num_requests} requests in {took_s:.1f} s ({num_requests / took_s:.0f} simulated a second)")
    from tools.simulation.figure_tables import tables_of  # after the runs, because matplotlib takes a while to load
    from tools.simulation.plots import write_plots

    files = [write_json(values, folder), *write_plots(values, folder)]
    if parsed.json is not None:
        write_figures(measured_now(parsed.command_line, tables_of(values, num_requests, took_s)), parsed.json)
        files.append(parsed.json)
    console.print("written:", *map(str, files), soft_wrap=True)
    return 0


def parse_override(text: str) -> dict[str, Any]:
    """Parse ``cluster.instances=4``; a value that is not TOML is a text. Raises: SimulationError."""
    key, equals, value = text.partition("=")
    try:
        return tomllib.loads(f"{key} = {value}") if equals else _refuse(text)
    except (ValueError, RecursionError):  # not TOML, or a number too long, or lists in lists without end
        pass
    try:
        result: dict[str, Any] = tomllib.loads(f"{key} = ''")
    except tomllib.TOMLDecodeError:
        _refuse(text)
    inner = result
    *path, last = key.strip().split(".")
    for part in path:
        inner = inner[part]
    inner[last] = value
    return result


def _refuse(text: str) -> dict[str, Any]:
    raise SimulationError(f"--set {text}: expected KEY=VALUE, as cluster.instances=4")


class _ProgressLines:
    """On a terminal, a bar for each case that has begun; otherwise a line at the start and for each finished run."""

    def __init__(self, experiment: Experiment) -> None:
        self._cases = experiment.cases
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[int, TaskID] = {}
        self._num_runs = [0] * len(experiment.cases)

    def __enter__(self) -> "_ProgressLines":
        self._bars.start()
        if not self._console.is_terminal:
            instances = max(case.config.cluster.num_workers for case in self._cases)
            told = f"simulating {len(self._cases)} case(s) on {instances} instance(s)"
            self._console.print(told, highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def report(self, progress: runner.Progress) -> None:
        case = self._cases[progress.case]
        name = " ".join(part for part in (case.variant, case.arm) if part) or "run"
        rate = "" if progress.rate_per_s is None else f" at {progress.rate_per_s:.3g}/s"
        if self._console.is_terminal:
            if progress.case not in self._tasks:
                self._tasks[progress.case] = self._bars.add_task(name, total=1.0, at="")
            at = f"{progress.num_runs} runs done{rate}"
            self._bars.update(self._tasks[progress.case], completed=progress.share, at=at)
        elif progress.num_runs > self._num_runs[progress.case]:
            self._num_runs[progress.case] = progress.num_runs
            self._console.print(f"{name}{rate}: done", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
