"""``tools/bench``: measurements, one subcommand each."""

import argparse
import sys
from collections.abc import Sequence

from tools.benchmarks import serve
from tools.benchmarks.errors import BenchError

EXIT_UNUSABLE = 2  # nothing was measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure a running server.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve_parser = commands.add_parser("serve", help="latencies and throughput of a running server")
    serve.add_arguments(serve_parser)
    serve_parser.set_defaults(run=serve.run)
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
