"""``tools/profile``: measures this engine on this hardware, or fits its profile to a server's journal.

``tools/profile fit`` fits published measurements.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from actorserve.errors import ActorserveError
from tools.profiling import calibrate, fit
from tools.profiling.errors import NoCapsError, ProfilingError

EXIT_NO_CAPS = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


def _measure_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/profile",
        description="Measure the engine's times on this hardware, and keep them where workers find them.",
        epilog="tools/profile fit --help: make profiles from published measurements.",
    )
    parser.add_argument(
        "--model", default="default", help="default, a GGUF file, or a Hugging Face folder (default: default)"
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="auto: the model's weights; dummy: random weights (default: auto)",
    )
    parser.add_argument(
        "--dtype", default="auto", help="numbers to compute with, as in tools/serve (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: as many as a worker of tools/serve has)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
    parser.add_argument("--quick", action="store_true", help="measure only what a first start measures")
    parser.add_argument(
        "--caps",
        action="store_true",
        help="also measure times and power under a series of power caps, on a GPU that nothing else uses; needs root",
    )
    calibrate.add_argument(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: a file in the cache that workers read)"
    )
    return parser


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["fit"]:
        parser = argparse.ArgumentParser(prog="tools/profile fit", description=fit.DESCRIPTION)
        fit.add_arguments(parser)
        return fit.run(parser.parse_args(arguments[1:]))
    parsed = _measure_parser().parse_args(arguments)
    if parsed.from_journal is not None:
        return calibrate.run(parsed)
    from tools.profiling import engine  # loads the engine, which a fit does not need

    return engine.run(parsed)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except NoCapsError as error:
        print(f"profile: {error}", file=sys.stderr)
        return EXIT_NO_CAPS
    except (ProfilingError, ActorserveError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("profile: interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
