"""Arguments that several commands share, and parsers of their texts."""

import argparse
from pathlib import Path


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError("must be numbers of at least 1, with commas between them")
    return values


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="default, a GGUF file, or a Hugging Face folder")
