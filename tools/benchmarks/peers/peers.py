"""``tools/bench peers``: build llama.cpp, or install Ray or SplitwiseSim, which measurements compare with."""

import argparse

from rich.console import Console

from tools.benchmarks.common.errors import BenchError
from tools.benchmarks.peers import llama_build, ray_build
from tools.benchmarks.simulators import splitwise_sim_build

_PEERS = ("llama.cpp", "ray", "splitwise-sim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", nargs="?", choices=_PEERS, default=_PEERS[0], help="(%(default)s)")
    parser.add_argument("--source", metavar="URL", help="where git finds SplitwiseSim: a URL or a folder")


def run(arguments: argparse.Namespace) -> int:
    """Raises: BenchError."""
    console = Console()
    if arguments.source is not None and arguments.peer != "splitwise-sim":
        raise BenchError(f"--source is not expected with {arguments.peer}")
    if arguments.peer == "ray":
        ray_build.ensure_ray(console)
    elif arguments.peer == "splitwise-sim":
        splitwise_sim_build.ensure_build(console, arguments.source or splitwise_sim_build.SOURCE)
    else:
        llama_build.ensure_build(console)
    return 0
