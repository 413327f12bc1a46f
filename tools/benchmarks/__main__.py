"""``tools/bench``: measurements, one subcommand each."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks import serve
from tools.benchmarks.errors import BenchError

EXIT_UNUSABLE = 2  # nothing was measured


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="default, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads (1, as in each of two workers on two cores)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each shape; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def _run_engine(arguments: argparse.Namespace) -> int:
    from tools.benchmarks import engine  # brings torch, which the others do without

    return engine.run(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure a running server, or its parts.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve_parser = commands.add_parser("serve", help="latencies and throughput of a running server")
    serve.add_arguments(serve_parser)
    serve_parser.set_defaults(run=serve.run)
    engine_parser = commands.add_parser("engine", help="iterations of the engine alone, with and without row tiles")
    _add_engine_arguments(engine_parser)
    engine_parser.set_defaults(run=_run_engine)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("bench: interrupted before anything was measured", file=sys.stderr)
        return serve.EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
