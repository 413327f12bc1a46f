"""Runs random histories of the whole cluster. ``python -m tests.core.faults.run --help``: by hand."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from tests.core.faults.history import HistoryError, run_histories
from tests.core.faults.machine import ClusterMachine
from tests.core.faults.rare_rules import RARE_RULES
from tests.core.faults.rules import RULES
from tests.core.faults.seen import Seen

NUM_STEPS = 40
LEAST_IN_100 = {
    "adopted from a migration": 160,
    "adopted from a checkpoint": 7,
    "checkpoint confirmed": 250,
    "checkpoint voided": 20,
    "copy of a migration failed": 4,
    "copy of a checkpoint failed": 1,
    "move withdrawn at StepDone": 60,
    "handed off": 100,
    "handed off while the prompt ran": 20,
    "handoff ended early": 80,
    "copied before its iteration ended": 2,
    "instance drafted": 1500,
    "hand-over refused": 30,
    "hand-over timed out": 12,
    "moved on to a third worker": 12,
    "moved back": 40,
    "one-sided cut": 25,
    "torn read": 30,
    "migration of another request": 5,
    "checkpoint of another request": 3,
    "paired by the coordinator": 80,
    "instance reserved": 100,
    "placed after a wait": 200,
    "started for a pool": 15,
    "newcomer given a role": 8,
    "ended by scaling": 20,
    "step with several priorities": 1500,
}
"""How often each rare event happens at least in 100 histories, so that no change quietly stops a kind of fault."""


def run(first: int, num_histories: int, *, shorten: bool = True) -> Counter[str]:
    """Run the histories from number ``first`` on. Returns what happened in them. Raises: HistoryError."""
    seen = Seen()
    numbers = range(first, first + num_histories)
    run_histories(lambda: ClusterMachine({**RULES, **RARE_RULES}, seen), numbers, NUM_STEPS, shorten=shorten)
    return seen.counts


def too_rare(counts: Counter[str], num_histories: int) -> dict[str, int]:
    """The counts of events that happened too rarely in ``num_histories`` histories; in fewer than 100 none can."""
    num_hundreds = num_histories // 100
    return {what: counts[what] for what, least in LEAST_IN_100.items() if counts[what] < least * num_hundreds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line of JSON: the counts and, if a history failed, what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--histories", type=int, default=1, help="how many histories")
    chosen = parser.parse_args(arguments)
    try:
        counts = run(chosen.first, chosen.histories, shorten=False)
    except HistoryError as failure:
        print(json.dumps({"failed": failure.what, "history": failure.number}))  # noqa: T201
        return 1
    rare = too_rare(counts, chosen.histories)
    print(json.dumps({"counts": dict(sorted(counts.items())), "too_rare": rare}))  # noqa: T201
    return 1 if rare else 0


if __name__ == "__main__":
    sys.exit(main())
