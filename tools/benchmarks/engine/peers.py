"""Which engines take part in a measurement, and with what models and threads."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from actorserve.errors import ActorserveError
from actorserve.model_files.locate import locate
from tools.benchmarks.common.arguments import add_model, names
from tools.benchmarks.common.console import say
from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.engine import formats
from tools.benchmarks.peers import llama_build
from tools.benchmarks.peers.peer_process import Entry

OURS = "actorserve"
LLAMA = "llama.cpp"
TRANSFORMERS = "transformers"
SAME_FILE = "same file"
_PEERS = "tools.benchmarks.peers"


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--dtypes",
        type=names,
        default=("int8", "int4", "float32"),
        metavar="A,B",
        help="our engine's numeric modes (int8,int4,float32)",
    )
    parser.add_argument(
        "--formats",
        type=names,
        default=formats.FORMATS,
        metavar="A,B",
        help="llama.cpp's formats in addition to the file's own",
    )
    parser.add_argument("--only-ours", action="store_true", help="measure no peers")
    parser.add_argument("--threads", type=int, help="CPU threads of each peer (all cores)")


def entries(arguments: argparse.Namespace, console: Console) -> list[Entry]:
    """All engines that take part. A peer that is not installed is left out, and a line says so. Raises: BenchError."""
    try:
        model = locate(arguments.model)
    except ActorserveError as error:
        raise BenchError(str(error)) from None
    ours = [
        Entry(f"{OURS} {dtype}", "", f"{_PEERS}.ours", {"model": str(model), "dtype": dtype})
        for dtype in arguments.dtypes
    ]
    if arguments.only_ours:
        return ours
    return ours + _llama_entries(model, arguments.formats, console) + _transformers_entries(model)


def _llama_entries(model: Path, wanted: Sequence[str], console: Console) -> list[Entry]:
    built = llama_build.find_build()
    if built is None:
        say(console, f"without {LLAMA}: {llama_build.ADVICE}")
        return []
    if model.is_dir():
        say(console, f"without {LLAMA}: it reads GGUF files, and {model} is a folder")
        return []
    files = {SAME_FILE: model} | {name: formats.converted(model, name, built) for name in wanted}
    return [
        Entry(
            f"{LLAMA} {name}",
            f"flash attention {'on' if flash_attention else 'off'}",
            f"{_PEERS}.llama",
            {"model": str(file), "flash_attention": flash_attention},
            built.python,
            built.environment,
        )
        for name, file in files.items()
        for flash_attention in (False, True)
    ]


def _transformers_entries(model: Path) -> list[Entry]:
    return [Entry(f"{TRANSFORMERS} float32", "", f"{_PEERS}.hugging_face", {"model": str(model)})]
