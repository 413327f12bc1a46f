"""``tools/bench serve``: latencies and throughput as clients see them, of one server or of several in turns."""

import argparse

from tools.benchmarks.serving import one_server, side_by_side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    one_server.add_arguments(parser)
    side_by_side.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status. Raises: BenchError."""
    return side_by_side.run(arguments) if arguments.peer else one_server.run(arguments)
