"""``tools/bench perplexity``: what each numeric mode costs in accuracy on English text, compared with float32."""

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from actorserve.model_files.tokenizer import load_tokenizer
from tools.benchmarks.common.arguments import add_json
from tools.benchmarks.common.console import print_table, say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.common.figures import save_figures
from tools.benchmarks.engine.peers import LLAMA, OURS, add_peer_arguments, entries
from tools.benchmarks.peers.peer_process import Entry, PeerProcess
from tools.benchmarks.peers.protocol import BlockBudget
from tools.figures.figure import Column, Figure, FigureTable, Row
from tools.figures.machine import machine_line, this_machine

TITLE = "Perplexity on English text"
_BASE = f"{OURS} float32"


@dataclass(frozen=True, slots=True)
class Score:
    """``loss`` is the mean over tokens, in nats."""

    name: str
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_peer_arguments(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="English text (the topics of Python's own help)")
    parser.add_argument("--tokens", type=int, default=9216, help="length of the text that is scored (%(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens that a model sees at once (%(default)s)")
    add_json(parser)


def windows(token_ids: list[int], num_tokens: int, size: int) -> list[list[int]]:
    """Whole windows of the first ``num_tokens``. Raises: BenchError, if there is none."""
    used = token_ids[:num_tokens]
    found = [used[start : start + size] for start in range(0, len(used) - size + 1, size)]
    if not found or size < 2:
        raise BenchError(f"{len(used)} tokens of text make no window of {size}; a window has at least 2")
    return found


def _tokens(arguments: argparse.Namespace) -> list[int]:
    try:
        text = arguments.text.read_text(encoding="utf-8") if arguments.text else "\n".join(topics.values())
        return load_tokenizer(describe(locate(arguments.model))).encode(text[: 20 * arguments.tokens])
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise BenchError(f"cannot read {arguments.text}: {reason}") from None


def chosen(found: list[Entry]) -> list[Entry]:
    """Our modes, float32 first, and each of llama.cpp's formats once, without flash attention."""
    ours = [entry for entry in found if entry.name.startswith(OURS)]
    llama = [entry for entry in found if entry.name.startswith(LLAMA) and not entry.options["flash_attention"]]
    return sorted(ours, key=lambda entry: entry.name != _BASE) + llama


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises: BenchError."""
    console = Console()
    machine = this_machine()
    texts = windows(_tokens(arguments), arguments.tokens, arguments.window)
    if "float32" not in arguments.dtypes:
        arguments.dtypes = ("float32", *arguments.dtypes)
    budget = BlockBudget(arguments.threads or machine.cores, 1, 1, arguments.window, 1)
    num_predicted = sum(len(window) - 1 for window in texts)
    scores = []
    with Progress(console=console, transient=True) as progress:
        for entry in chosen(entries(arguments, console)):
            with ExitStack() as process:
                bar = progress.add_task(entry.name, total=len(texts))
                peer = process.enter_context(PeerProcess(entry, budget))
                peer.wait_ready()
                nats = 0.0
                for window in texts:
                    nats += peer.score(window)
                    progress.advance(bar)
            scores.append(Score(entry.name, nats / num_predicted))
    say(console, f"{arguments.model}: {num_predicted} tokens in windows of {arguments.window}; {machine_line(machine)}")
    table = Table("mode", "perplexity", "over float32's")
    for score in scores:
        table.add_row(score.name, f"{score.perplexity:.3f}", f"{increase_percent(score, scores[0]):+.2f}%")
    print_table(console, table)
    save_figures(arguments, [table_of(scores)], {"num_tokens": num_predicted}, machine)
    return 0


def increase_percent(score: Score, base: Score) -> float:
    return 100 * (score.perplexity / base.perplexity - 1)


def table_of(scores: Sequence[Score]) -> FigureTable:
    """The first score is what the others are compared with."""
    columns = (Column("perplexity", decimals=3), Column("over float32's", "%", 2))
    rows = tuple(
        Row(
            score.name,
            (
                Figure(score.perplexity, rounds=1),
                Figure(increase_percent(score, scores[0]), rounds=1) if number else None,
            ),
        )
        for number, score in enumerate(scores)
    )
    return FigureTable(TITLE, "mode", columns, rows)
