"""``tools/bench peers``: build llama.cpp or install Ray, which measurements compare with."""

import argparse

from rich.console import Console

from tools.benchmarks.peers import llama_build, ray_build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", nargs="?", choices=("llama.cpp", "ray"), default="llama.cpp", help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Raises: BenchError."""
    console = Console()
    if arguments.peer == "ray":
        ray_build.ensure_ray(console)
    else:
        llama_build.ensure_build(console)
    return 0
