"""``tools/fuzz``: broken and hostile input for every socket of a running server, with real requests beside it.

Exit status: 0 if the server stood it, 1 if not, 2 if nothing could be sent.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_json, add_model, count
from tools.benchmarks.common.console import print_figures, say
from tools.benchmarks.common.figures import save_figures
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.files import command_line
from tools.figures.machine import machine_line, this_machine
from tools.fuzzing.rounds import SHARES, FailedRoundError, Seen, fuzz
from tools.fuzzing.server import OVERS

FRAMES_TITLE: Final = "Hostile input"
MEMORY_TITLE: Final = "Memory under hostile input"
EXIT_BROKEN: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_INTERRUPTED: Final = 130
_SHORT: Final = 12_000
_LONG: Final = 1_000_000
_MIB: Final = 2**20
_SHOWN_FRAMES: Final = 3


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description="Hostile input for every socket of a server.")
    parser.add_argument("--long", action="store_true", help=f"a million frames instead of {_SHORT}")
    parser.add_argument("--frames", type=count, help="frames in all")
    parser.add_argument("--seed", default="0", help="the same seed gives the same frames (%(default)s)")
    parser.add_argument("--over", choices=OVERS, help="only the server whose processes talk over this (all)")
    parser.add_argument("--only", choices=tuple(SHARES), help="only these sockets (all)")
    parser.add_argument(
        "--failed",
        type=Path,
        default=Path("fuzz-failed.txt"),
        metavar="FILE",
        help="gets the last frames before a failure (%(default)s)",
    )
    add_model(parser)
    add_json(parser)
    return parser


def tables_of(all_seen: Sequence[Seen]) -> list[FigureTable]:
    frames = tuple(
        Row(name, tuple(Figure(seen.frames[name]) for seen in all_seen))
        for name in SHARES
        if any(s.frames[name] for s in all_seen)
    )
    others = (
        Row("all", tuple(Figure(seen.frames.total()) for seen in all_seen)),
        Row("right answers to real requests beside it", tuple(Figure(seen.num_answers) for seen in all_seen)),
        Row("processes that ended, failed answers, errors in logs", tuple(Figure(0) for _ in all_seen)),
    )
    columns = tuple(Column(f"over {seen.over}", "", 0) for seen in all_seen)
    memory = tuple(
        Row(
            f"{name.rpartition('/')[2]}, over {seen.over}",
            (
                Figure(warm / _MIB),
                Figure(seen.last_rss_bytes[name] / _MIB),
                Figure((seen.last_rss_bytes[name] - warm) / _MIB),
            ),
        )
        for seen in all_seen
        for name, warm in seen.warm_rss_bytes.items()
    )
    sizes = (Column("after the warm-up", "MiB", 1), Column("at the end", "MiB", 1), Column("growth", "MiB", 1))
    return [
        FigureTable(FRAMES_TITLE, "frames, connections and requests", columns, frames + others),
        FigureTable(MEMORY_TITLE, "process", sizes, memory),
    ]


def tell_failure(failure: FailedRoundError, seed: str, file: Path) -> None:
    """Say how to repeat it, show the last frames, and write more of them to ``file``."""
    print(f"fuzz: {failure}", file=sys.stderr)
    print(f"fuzz: seed {seed}; the last frames, the newest last (more in {file}):", file=sys.stderr)
    lines = [f"{where}: {frame.hex()}" for where, frame in failure.recent]
    for line in lines[-_SHOWN_FRAMES:]:
        print(f"  {line[:600]}", file=sys.stderr)
    file.write_text("\n".join([f"{failure}; seed {seed}", *lines]) + "\n", encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    texts = sys.argv[1:] if given is None else list(given)
    arguments = make_parser().parse_args(texts)
    for number in (signal.SIGINT, signal.SIGTERM):  # so that it ends its server; a shell ignores Ctrl-C in background
        signal.signal(number, signal.default_int_handler)
    arguments.command_line = command_line("tools/fuzz", texts)
    console, machine = Console(), this_machine()
    overs = OVERS if arguments.over is None else (arguments.over,)
    frames = arguments.frames or (_LONG if arguments.long else _SHORT)
    say(console, f"{machine_line(machine)}; seed {arguments.seed}")
    try:
        model = str(locate(arguments.model))
        share = -(-frames // len(overs))
        all_seen = [
            fuzz(over, model, arguments.seed, share, arguments.only, lambda line: say(console, line)) for over in overs
        ]
    except FailedRoundError as failure:
        tell_failure(failure, arguments.seed, arguments.failed)
        return EXIT_BROKEN
    except ActorserveError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("fuzz: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    tables = tables_of(all_seen)
    for table in tables:
        print_figures(console, table)
    details = {"seconds": [seen.seconds for seen in all_seen], "log_bytes": [seen.log_bytes for seen in all_seen]}
    for seen in all_seen:
        say(console, f"over {seen.over}: {seen.seconds:.0f} s, and {seen.log_bytes:,} bytes of logs")
    save_figures(arguments, tables, details, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
