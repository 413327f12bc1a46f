"""Arguments of the commands that measure one engine in this process."""

import argparse

from tools.benchmarks.common.arguments import add_model


def add_one_engine(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--threads", type=int, help="CPU threads (all cores)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="measurements of each shape; medians are shown (%(default)s)"
    )
