"""``tools/bench perplexity``: what each numeric mode costs in accuracy, on English text, beside float32."""

import argparse
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from actorserve.errors import ActorserveError
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from actorserve.model_files.tokenizer import load_tokenizer
from tools.benchmarks.engine import LLAMA, OURS, add_peer_arguments, entries
from tools.benchmarks.errors import BenchError
from tools.benchmarks.machine import machine_line, this_machine
from tools.benchmarks.peers.peer_process import Entry, PeerProcess
from tools.benchmarks.peers.protocol import BlockBudget
from tools.benchmarks.report import write_json

_BASE = f"{OURS} float32"


@dataclass(frozen=True, slots=True)
class Score:
    """``loss``: the mean over tokens, in nats."""

    name: str
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_peer_arguments(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="English text (the topics of Python's own help)")
    parser.add_argument("--tokens", type=int, default=9216, help="of the text, from its beginning (%(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens that a model sees at once (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def windows(token_ids: list[int], num_tokens: int, size: int) -> list[list[int]]:
    """Whole windows of the first ``num_tokens``. Raises: BenchError, where there is none."""
    used = token_ids[:num_tokens]
    found = [used[start : start + size] for start in range(0, len(used) - size + 1, size)]
    if not found or size < 2:
        raise BenchError(f"{len(used)} tokens of text make no window of {size}, of at least 2")
    return found


def _tokens(arguments: argparse.Namespace) -> list[int]:
    try:
        text = arguments.text.read_text(encoding="utf-8") if arguments.text else "\n".join(topics.values())
        return load_tokenizer(describe(locate(arguments.model))).encode(text[: 20 * arguments.tokens])
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise BenchError(f"cannot read {arguments.text}: {reason}") from None


def chosen(found: list[Entry]) -> list[Entry]:
    """Ours, float32 first, and llama.cpp's formats, each once: without flash attention."""
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
    room = BlockBudget(arguments.threads or machine.cores, 1, 1, arguments.window, 1)
    num_predicted = sum(len(each) - 1 for each in texts)
    scores = []
    with Progress(console=console, transient=True) as progress:
        for entry in chosen(entries(arguments, console)):
            with ExitStack() as process:
                bar = progress.add_task(entry.name, total=len(texts))
                peer = process.enter_context(PeerProcess(entry, room))
                peer.wait_ready()
                nats = 0.0
                for each in texts:
                    nats += peer.score(each)
                    progress.advance(bar)
            scores.append(Score(entry.name, nats / num_predicted))
    console.print(
        f"{arguments.model}: {num_predicted} tokens in windows of {arguments.window}; {machine_line(machine)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table("mode", "perplexity", "over float32's")
    for score in scores:
        table.add_row(
            score.name, f"{score.perplexity:.3f}", f"{100 * (score.perplexity / scores[0].perplexity - 1):+.2f}%"
        )
    console.print(table)
    if arguments.json is not None:
        figures = [asdict(score) | {"perplexity": score.perplexity} for score in scores]
        write_json({"machine": asdict(machine), "tokens": num_predicted, "scores": figures}, arguments.json)
    return 0
