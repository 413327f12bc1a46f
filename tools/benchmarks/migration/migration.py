"""``tools/bench migration``: the cost of moving a running request, for it and its neighbours, in each way.

Each way has two workers of its own on this machine, and takes a turn at each context length in each round. A request
decodes on the source, with neighbours on both sides; then the source is told to move it. Times are taken where the
gateway hands out tokens. The tokens must be those of the same request when it stays, or the measurement fails. The
model is made up: random weights, grouped queries, and a context that is long enough.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actorserve.core.messages import RequestSpec
from actorserve.core.migration.config import MigrationMode
from actorserve.wire.journal import Entry
from tools.benchmarks.common.arguments import counts
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.common.journals import entries_of
from tools.benchmarks.migration.move_times import (
    PARTS,
    Move,
    MoveSummary,
    by_length,
    gaps_of,
    goals_of,
    num_stages,
    parts_of,
    slowdown_of,
    summary_of,
    usual_gap_s,
)
from tools.benchmarks.migration.pair import DESTINATION, GATEWAY, SOURCE, Pair, Stream
from tools.benchmarks.migration.set_up import (
    PairMaker,
    Requests,
    add_pair_arguments,
    model_shape,
    require_tokens,
    run_with_workers,
    undisturbed_tokens,
)
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

WAYS = tuple(str(mode) for mode in MigrationMode)
DOWNTIME = "Downtime of a request that moves"
COSTS = "What a move costs, and its neighbours' time per token during the move over that before"
_MOVED_TOKENS = 1024  # the most that the moved request may generate; more than any measurement takes
_NEIGHBOUR_TOKENS = 4096  # likewise for its neighbours, which also decode while its KV is recomputed
_WARM_UP_TOKENS = 64
_AFTER_TOKENS = 4  # generated at the destination before a measurement ends
_SIDES = (SOURCE, DESTINATION)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A move before the journals are read. From ``steady_s`` on the subject and all neighbours decode."""

    context_tokens: int
    way: str
    subject: Stream
    steady_s: float
    ordered_s: float
    copied_bytes: int
    has_adopted: bool
    slowdown: dict[str, float | None]

    @property
    def name(self) -> str:
        return f"{self.way}: a request of {self.context_tokens} tokens was moved and"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = (256, 1024, 2048, 4096, 8192)
    parser.add_argument("--lengths", type=counts, default=lengths, metavar="N,N", help="prompts of the moved requests")
    parser.add_argument("--ways", type=_ways, default=WAYS, metavar="A,B", help=f"ways to move them ({','.join(WAYS)})")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in which each way and length has a turn (%(default)s)"
    )
    parser.add_argument("--neighbours", type=int, default=4, help="other requests on each worker (%(default)s)")
    parser.add_argument(
        "--neighbour-tokens", type=int, default=512, help="length of the neighbours' prompts (%(default)s)"
    )
    parser.add_argument("--before", type=int, default=24, help="tokens that are generated before a move (%(default)s)")
    parser.add_argument("--mib-per-s", type=float, help="limit on copying KV while its request runs (no limit)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the downtime to this PNG file")
    add_pair_arguments(parser)


def _ways(text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    if len(set(ways)) < len(ways) or not set(ways) <= set(WAYS):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(WAYS)}, with commas between them")
    return ways


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: ActorserveError, KeyboardInterrupt."""
    _check(arguments)
    console = Console()
    machine = this_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        maker = PairMaker(arguments, folder, stack, len(arguments.ways), _max_tokens(arguments))
        pairs = {way: _pair(way, arguments, maker) for way in arguments.ways}
        with console.status("") as status:
            bench = _Bench(arguments, pairs, status.update)
            run_with_workers(pairs.values(), bench.run, bench.tell)
        moves = [_move(measured, pairs[measured.way]) for measured in bench.measured]
    summaries = [
        summary_of([move for move in moves if (move.context_tokens, move.way) == (length, way)])
        for length in arguments.lengths
        for way in arguments.ways
    ]
    say(console, f"two workers of {arguments.threads} thread(s) on {machine_line(machine)}")
    around = f"{arguments.neighbours} neighbours of {arguments.neighbour_tokens} tokens on each"
    say(console, f"{around}; medians of {arguments.rounds} rounds; no move changed a token")
    show(summaries, console)
    details = {
        "model": model_shape(_max_tokens(arguments)),
        "summaries": [asdict(summary) for summary in summaries],
        "goals": [asdict(goal) | {"is_met": goal.is_met} for goal in goals_of(summaries)],
        "moves": [asdict(move) for move in moves],
    }
    save_figures(arguments, tables_of(summaries), details, machine)
    if arguments.plot is not None:
        from tools.benchmarks.migration.plot import write_plot  # imports matplotlib, which takes a while

        write_plot(summaries, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if min(arguments.rounds, arguments.threads, arguments.neighbour_tokens) < 1 or arguments.neighbours < 0:
        raise BenchError("--rounds, --threads and --neighbour-tokens must be at least 1, --neighbours at least 0")
    if len(set(arguments.lengths)) < len(arguments.lengths):
        raise BenchError("--lengths must be different numbers")
    if not 4 <= arguments.before <= _MOVED_TOKENS // 4:
        raise BenchError(f"--before must be from 4 to {_MOVED_TOKENS // 4}")


def _max_tokens(arguments: argparse.Namespace) -> int:
    moved = max(*arguments.lengths, _WARM_UP_TOKENS) + _MOVED_TOKENS
    return int(max(moved, arguments.neighbour_tokens + _NEIGHBOUR_TOKENS))


def _pair(way: str, arguments: argparse.Namespace, maker: PairMaker) -> Pair:
    neighbours = arguments.neighbours * (arguments.neighbour_tokens + _NEIGHBOUR_TOKENS)
    settings = {
        "cluster": {"journal_dir": str(maker.folder_of(way))},
        "migration": {"mode": way, "bytes_per_s": arguments.mib_per_s and round(arguments.mib_per_s * 2**20)},
    }
    return maker.make(way, _max_tokens(arguments) + neighbours, settings)


class _Bench:
    """All rounds, once the workers are ready."""

    def __init__(self, arguments: argparse.Namespace, pairs: dict[str, Pair], tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.measured: list[_Measured] = []
        self._pairs = pairs
        self._arguments = arguments
        self._requests = Requests(arguments.seed)

    async def run(self) -> None:
        """Raises: BenchError."""
        arguments = self._arguments
        for way in arguments.ways:
            self.tell(f"{way}: warming up")
            await self._measure(way, _WARM_UP_TOKENS, -1)  # the first move between two workers opens their link
        ways = list(arguments.ways)
        for number in range(arguments.rounds):
            first = number % len(ways)
            for length in arguments.lengths:
                measured = []
                for way in (*ways[first:], *ways[:first]):
                    self.tell(f"round {number + 1} of {arguments.rounds}: {length} tokens, {way}")
                    measured.append(await self._measure(way, length, number))
                self.tell(f"round {number + 1} of {arguments.rounds}: {length} tokens, without a move")
                num_tokens = min(len(move.subject.token_ids) for move in measured)
                expected = await undisturbed_tokens(self._pairs[ways[0]], self._moved(length, number), num_tokens)
                require_tokens(expected, ((move.name, move.subject.token_ids) for move in measured))
                self.measured += measured

    async def _measure(self, way: str, length: int, number: int) -> _Measured:
        arguments, pair = self._arguments, self._pairs[way]
        subject = pair.open(self._moved(length, number), SOURCE)
        await pair.until_made([subject], 1)
        neighbours = {
            side: [pair.open(self._neighbour(side, place), side) for place in range(arguments.neighbours)]
            for side in _SIDES
        }
        all_neighbours = [stream for streams in neighbours.values() for stream in streams]
        await pair.until_made(all_neighbours, 1)
        await pair.until_made([subject], len(subject.times_s) + arguments.before)
        before = await pair.fresh_reports()
        ordered_s = pair.order_move(self._order_bytes(pair, length + len(subject.times_s)))
        handed_over_s = await pair.until_handed_over(subject)
        num_at_source = sum(at_s <= handed_over_s for at_s in subject.times_s)
        await pair.until_made([subject], num_at_source + _AFTER_TOKENS)
        for stream in all_neighbours:
            await pair.until_made([stream], len(stream.times_s) + 1)
        after = await pair.fresh_reports()
        # Without copied KV the move lasts until the destination has computed it again.
        end_s = handed_over_s if subject.migration else subject.times_s[num_at_source]
        steady_s = max(stream.times_s[0] for stream in (subject, *all_neighbours))
        slowdown = {
            name: slowdown_of([stream.times_s for stream in neighbours[side]], steady_s, ordered_s, end_s)
            for name, side in (("source", SOURCE), ("destination", DESTINATION))
        }
        if any(stream.handed_over_s is not None for stream in all_neighbours):
            raise BenchError(f"{way}: a neighbour was moved")
        await pair.end_all()
        return _Measured(
            length,
            way,
            subject,
            steady_s,
            ordered_s,
            after[SOURCE].migrated_bytes - before[SOURCE].migrated_bytes if subject.migration else 0,
            after[DESTINATION].num_tokens_looked_up == before[DESTINATION].num_tokens_looked_up,
            slowdown,
        )

    def _moved(self, length: int, number: int) -> RequestSpec:
        """The request that is moved first, because it is the least urgent.

        No two prompts begin alike. Otherwise the destination could have the KV cached.
        """
        return self._requests.make(f"moved-{number}-{length}", length, _MOVED_TOKENS, priority=1)

    def _neighbour(self, side: str, number: int) -> RequestSpec:
        return self._requests.make(f"{side}-neighbour-{number}", self._arguments.neighbour_tokens, _NEIGHBOUR_TOKENS)

    def _order_bytes(self, pair: Pair, num_tokens: int) -> int:
        """The KV bytes to order: enough for the request with ``num_tokens``, too few for a neighbour as well."""
        report = pair.reports()[SOURCE]
        return (num_tokens // report.tokens_per_block + 2) * report.bytes_per_block


def _move(measured: _Measured, pair: Pair) -> Move:
    """Raises: BenchError."""
    subject = measured.subject
    handed_over_s, times_s = subject.handed_over_s, subject.times_s
    assert handed_over_s is not None
    assert pair.journal_dir is not None
    parts: dict[str, float] = {}
    stages = 0
    if subject.migration is not None:
        last = sum(at_s <= handed_over_s for at_s in times_s) - 1

        def journal(name: str) -> list[Entry]:
            assert pair.journal_dir is not None
            from_s, until_s = measured.ordered_s - 1.0, times_s[last + 1] + 1.0
            return [entry for entry in entries_of(pair.journal_dir, name) if from_s <= entry.now <= until_s]

        destination = journal(DESTINATION)
        stages = num_stages(destination, subject.migration)
        parts = parts_of(
            journal(GATEWAY), destination, subject.migration, subject.request_id, times_s[last], times_s[last + 1]
        )
    downtime_s, longest_gap_s = gaps_of(times_s, measured.ordered_s, handed_over_s)
    return Move(
        context_tokens=measured.context_tokens,
        way=measured.way,
        step_s=usual_gap_s(times_s, measured.steady_s, measured.ordered_s),
        downtime_s=downtime_s,
        longest_gap_s=longest_gap_s,
        duration_s=handed_over_s - measured.ordered_s,
        has_adopted=measured.has_adopted,
        num_stages=stages,
        copied_bytes=measured.copied_bytes,
        slowdown=measured.slowdown,
        parts=parts,
    )


def tables_of(summaries: Sequence[MoveSummary]) -> list[FigureTable]:
    """Downtimes by context and way; then what each move cost."""
    ways = list(dict.fromkeys(summary.way for summary in summaries))
    columns = [Column("a decode step", "ms")]
    for way in ways:
        columns += [Column(way, "ms"), Column(f"{way}, steps")]
    rows = []
    for length, of_way in by_length(summaries).items():
        cells: list[Figure | None] = [of_way[ways[0]].step_ms]
        for way in ways:
            cells += [of_way[way].downtime_ms, of_way[way].downtime_steps]
        rows.append(Row(f"{length:,} tokens", tuple(cells)))
    costs = [
        Row(
            f"{summary.context_tokens:,} tokens, {summary.way}",
            (
                summary.duration_ms,
                Figure(summary.num_stages),
                Figure(summary.copied_bytes / 2**20),
                *summary.slowdown.values(),
            ),
        )
        for summary in summaries
    ]
    cost_columns = (Column("order to hand-over", "ms"), Column("stages"), Column("copied", "MiB"))
    sides = tuple(Column(f"neighbours, {side}", "x", 2) for side in summaries[0].slowdown)
    return [
        FigureTable(DOWNTIME, "context", tuple(columns), tuple(rows)),
        FigureTable(COSTS, "context, way", (*cost_columns, *sides), tuple(costs)),
    ]


def show(summaries: Sequence[MoveSummary], console: Console) -> None:
    """Print for a person."""
    ways = list(dict.fromkeys(summary.way for summary in summaries))
    table = Table(
        "context", "step, ms", *(f"{way}, ms (steps)" for way in ways), title="downtime", title_justify="left"
    )
    for length, of_way in by_length(summaries).items():
        downtimes = (f"{of_way[way].downtime_ms.median:.0f} ({of_way[way].downtime_steps.median:.1f})" for way in ways)
        table.add_row(f"{length:,}", f"{of_way[ways[0]].step_ms.median:.1f}", *downtimes)
    print_table(console, table, first_numeric=0)
    table = Table(
        *("context", "way", "ms", "stages", "MiB", "with KV", "worst steps", "longest gap", "source", "destination"),
        title="from the order to the hand-over; neighbours: time per token meanwhile over that before",
        title_justify="left",
    )
    for summary in summaries:
        table.add_row(
            f"{summary.context_tokens:,}",
            summary.way,
            f"{summary.duration_ms.median:.0f}",
            f"{summary.num_stages:g}",
            f"{summary.copied_bytes / 2**20:.1f}",
            f"{summary.num_adopted}/{summary.num_moves}",
            f"{summary.downtime_steps.max:.1f}",
            f"{summary.longest_gap_steps.median:.1f}",
            *("-" if figure is None else f"{figure.median:.2f}" for figure in summary.slowdown.values()),
        )
    print_table(console, table, first_numeric=0)
    live = [summary for summary in summaries if summary.way == "live"]
    if live:
        table = Table(
            "until, ms",
            *(f"{summary.context_tokens:,}" for summary in live),
            title="live downtime",
            title_justify="left",
        )
        for name, text in PARTS.items():
            table.add_row(text, *(f"{summary.parts[name] * 1e3:.1f}" if summary.parts else "-" for summary in live))
        print_table(console, table, first_numeric=0)
    for goal in goals_of(summaries):
        outcome = "met" if goal.is_met else "missed"
        say(console, f"{goal.name}: {goal.value:.2f}; goal at most {goal.limit:g}: {outcome}")
