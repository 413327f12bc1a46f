"""``tools/bench mutants``: put one bug after another into a copy of the core, and run random faults on it.

A mutant that no history finds survives: the tests' random faults would not notice such a bug either.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.benchmarks.common.arguments import add_json, count
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.paths import ROOT
from tools.benchmarks.mutants.catalogue import MUTANTS
from tools.benchmarks.mutants.mutant import Mutant, MutantError
from tools.figures.figure import Column, Figure, FigureTable, Row

COPIED: Final = ("actorserve", "tests", "tools", "workers")
EXIT_SURVIVED: Final = 1
DEADLINE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``found`` says which history found the mutant, and how; empty if none did."""

    mutant: Mutant
    found: str

    @property
    def survives(self) -> bool:
        """Whether the mutant was not found, although it could be."""
        return not self.found and not self.mutant.why_equivalent

    def __str__(self) -> str:
        if self.found:
            return f"found       {self.mutant.name}: {self.found}"
        if self.mutant.why_equivalent:
            return f"equivalent  {self.mutant.name}: {self.mutant.why_equivalent}"
        return f"SURVIVES    {self.mutant.name}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants whose names have one of these texts")
    parser.add_argument("--histories", type=count, default=400, help="random histories for each mutant (default: 400)")
    parser.add_argument("--first", type=int, default=0, help="number of the first history (default: 0)")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="mutants at a time (default: cores)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine and report. Raises: MutantError, FigureError."""
    names, first, num_histories = arguments.names, arguments.first, arguments.histories
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    if not chosen:
        raise MutantError(f"no mutant's name has any of these texts: {', '.join(names)}")
    if failure := _failure(ROOT, first, num_histories):
        raise MutantError(f"the histories fail without any mutant: {failure}")
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(lambda mutant: examine(mutant, first, num_histories), chosen):
            print(verdict, flush=True)
            verdicts.append(verdict)
    num_found = sum(bool(verdict.found) for verdict in verdicts)
    num_survivors = sum(verdict.survives for verdict in verdicts)
    num_equivalent = len(verdicts) - num_found - num_survivors
    print(f"of {len(verdicts)} mutants {num_found} are found, {num_equivalent} are equivalent, {num_survivors} survive")
    save_figures(arguments, [table_of(verdicts, num_histories)], {str(v.mutant.name): v.found for v in verdicts})
    return EXIT_SURVIVED if num_survivors else 0


def examine(mutant: Mutant, first: int, num_histories: int) -> Verdict:
    """Run the histories on a copy of the core with this bug. Raises: MutantError if it cannot be put in."""
    with scratch_copy() as copy:
        mutant.apply(copy / "actorserve" / "core")
        return Verdict(mutant, _failure(copy, first, num_histories))


@contextmanager
def scratch_copy() -> Iterator[Path]:
    """A folder with a copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        for package in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "figures")
            shutil.copytree(ROOT / package, Path(name) / package, ignore=ignored)
        yield Path(name)


def table_of(verdicts: Sequence[Verdict], num_histories: int) -> FigureTable:
    """How many mutants of each part of the core were found."""
    rows = []
    for part in dict.fromkeys(verdict.mutant.path.partition("/")[0] for verdict in verdicts):
        of_part = [verdict for verdict in verdicts if verdict.mutant.path.startswith(f"{part}/")]
        numbers = (
            len(of_part),
            sum(bool(verdict.found) for verdict in of_part),
            sum(not verdict.found and not verdict.survives for verdict in of_part),
            sum(verdict.survives for verdict in of_part),
        )
        rows.append(Row(f"core/{part}", tuple(Figure(number) for number in numbers)))
    return FigureTable(
        f"Bugs that are put into the core, and {num_histories} random histories of faults",
        "part",
        tuple(Column(name, "", 0) for name in ("mutants", "found", "equivalent", "survive")),
        tuple(rows),
    )


def _failure(sources: Path, first: int, num_histories: int) -> str:
    """How the histories fail with these sources; empty if they pass. Raises: MutantError if they do not run."""
    command = [sys.executable, "-m", "tests.core.faults.run", "--first", f"{first}", "--histories", f"{num_histories}"]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    try:
        done = subprocess.run(
            command, cwd=sources, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the histories did not end in {DEADLINE_S / 60:.0f} minutes"
    if done.returncode == 0:
        return ""
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise MutantError(f"the histories did not run: {done.stderr.strip()[-500:]}") from error
    if "failed" in result:
        return f"history {result['history']}: {result['failed']}"
    return f"too rare: {result['too_rare']}"
