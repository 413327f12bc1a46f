"""``tools/simulate CONFIG``: run an experiment in virtual time, show it, write JSON and plots.

``tools/simulate compare A B`` compares two of them. ``tools/simulate provision FILE`` searches for the best cluster.
"""

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

from actorserve.errors import ActorserveError, ProtocolError, SimulationError
from actorserve.profile_files import MAX_DRIFT, drift_of
from actorserve.wire.replay import replay
from tools.figures.files import command_line, measured_now, write_figures
from tools.profiling.output import prepare_file
from tools.simulation.compare import show_comparison
from tools.simulation.experiment import Experiment, merged, read_experiment
from tools.simulation.progress import ProgressLines, counted
from tools.simulation.provisioning.command import run_provisioning
from tools.simulation.report import WHICH_IS_WHICH, show
from tools.simulation.result_files import JSON_NAME, as_values, read_results, write_results
from tools.simulation.runner import CaseResult, run_experiment

EXIT_DIFFERENT = 1  # a replayed core gave other effects
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
MIN_WIDTH = 100  # columns of the tables: a narrow terminal wraps them, which is better than cutting them off
COMPARE = "compare"
PROVISION = "provision"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/simulate",
        description="Simulate a cluster in virtual time, with the production schedulers.",
        epilog=f"{WHICH_IS_WHICH} With seeds = [1, 2, 3] in the file, or --set seeds=[1,2,3], each run is repeated "
        "with each seed, and tables show medians and the spread. 'tools/simulate compare A B' compares two results; "
        "'tools/simulate provision FILE' searches for the smallest clusters that hold service levels. "
        "Ended requests move to a temporary file, about 50 bytes each; TMPDIR names its folder.",
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
    parser.add_argument("--arm", action="append", default=[], metavar="NAME", help="run only this arm; may be repeated")
    _add_output_options(parser)
    _add_run_options(parser, "replace a value of the file, such as seed=2 or cluster.instances=4")
    return parser


def make_provision_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tools/simulate {PROVISION}",
        description="Search the numbers of machines with which each design holds its service levels at a load, and "
        "show the clusters that no other beats in both cost and power.",
    )
    parser.add_argument("config", type=Path, help="a file with a table [provision]; examples are in config/simulations")
    _add_output_options(parser)
    _add_run_options(parser, "replace a value of the file, such as provision.rate_per_s=50.0")
    return parser


def make_compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tools/simulate {COMPARE}",
        description="Compare the results of two experiments: for each arm and rate, figures of B over those of A, and "
        "whether they differ by more than the seeds do.",
        epilog=WHICH_IS_WHICH,
    )
    for name in ("a", "b"):
        parser.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"a {JSON_NAME}, the folder that holds it, or an experiment (.toml), which is run first",
        )
    _add_run_options(parser, "replace a value of each experiment that is run first: of A and of B, if both are")
    return parser


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the JSON file and the plots (default: simulated/NAME)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures that READMEs show to this file")


def _add_run_options(parser: argparse.ArgumentParser, set_help: str) -> None:
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
        help=f"{set_help}; may be repeated",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    makers = {COMPARE: make_compare_parser, PROVISION: make_provision_parser}
    verb = given[0] if given and given[0] in makers else ""
    parser = makers.get(verb, make_parser)()
    parsed = parser.parse_args(given[1:] if verb else given)
    parsed.command_line = command_line("tools/simulate", given)
    if parsed.processes < 1:
        parser.error("--processes must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if verb == COMPARE:
            return run_comparison(parsed)
        if verb == PROVISION:
            return run_provisioning(parsed, overrides_of(parsed), make_console())
        return run_experiment_file(parsed) if parsed.replay is None else run_replay(parsed.replay)
    except ActorserveError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except OSError as error:
        print(f"simulate: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("simulate: interrupted; results are written when all runs are done", file=sys.stderr)
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
    experiment = read_experiment(parsed.config, overrides_of(parsed))
    if parsed.arm:
        experiment = experiment.only(parsed.arm)
    folder = parsed.out or Path("simulated") / experiment.name
    prepare_file(folder / JSON_NAME)
    console = make_console()
    began_s = time.perf_counter()
    results = run(experiment, parsed.processes)
    took_s = time.perf_counter() - began_s
    values = as_values(experiment, results)
    files = [write_results(values, folder)]  # first of all, because the runs took the time
    show(values, console)
    num_requests = sum(figures["requests"]["arrived"] for result in results for figures in result.runs.values())
    requests = counted(num_requests, "request")
    console.print(f"{requests} in {took_s:.1f} s ({num_requests / took_s:.0f} simulated a second)")
    from tools.simulation.figure_tables import tables_of  # after the runs, because matplotlib takes a while to load
    from tools.simulation.plots import write_plots

    files += write_plots(values, folder)
    if parsed.json is not None:
        write_figures(measured_now(parsed.command_line, tables_of(values, num_requests, took_s)), parsed.json)
        files.append(parsed.json)
    console.print("written:", *map(str, files), soft_wrap=True)
    return 0


def run_comparison(parsed: argparse.Namespace) -> int:
    """Raises: ActorserveError, OSError."""
    # Both files are read before any run, so that an error is told at once.
    overrides = overrides_of(parsed)
    places: list[Path] = [parsed.a, parsed.b]
    if overrides and not any(place.suffix == ".toml" for place in places):
        raise SimulationError("--set is given with two results, which it cannot change: expected an experiment (.toml)")
    given = [read_experiment(place, overrides) if place.suffix == ".toml" else read_results(place) for place in places]
    a, b = (
        as_values(found, run(found, parsed.processes)) if isinstance(found, Experiment) else found for found in given
    )
    show_comparison(a, b, make_console())
    return 0


def overrides_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Raises: SimulationError."""
    overrides: dict[str, Any] = {}
    for text in parsed.set:
        overrides = merged(overrides, parse_override(text))
    return overrides


def run(experiment: Experiment, num_processes: int) -> list[CaseResult]:
    """Run all cases, and show how far they are. Raises: ActorserveError."""
    for profile in dict.fromkeys(profile for case in experiment.cases for profile in case.profiles):
        if drift_of(profile) > MAX_DRIFT:
            print(
                f"simulate: the profile {profile.name!r} was measured while the machine's speed changed by "
                f"{drift_of(profile):.0%} (errors.drift), so its times may be wrong by as much",
                file=sys.stderr,
            )
    with ProgressLines(experiment) as lines:
        return run_experiment(experiment, min(num_processes, len(experiment.cases)), lines.report)


def make_console() -> Console:
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    return console


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


if __name__ == "__main__":
    sys.exit(main())
