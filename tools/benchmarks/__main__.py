"""``tools/bench``: measurements, one subcommand each."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from actorserve.errors import ActorserveError
from tools.benchmarks import engine, fidelity, perplexity, policies, serve, serve_peers, start
from tools.benchmarks.peers import build

EXIT_UNUSABLE = 2  # nothing was measured


def _no_arguments(_: argparse.ArgumentParser) -> None:
    pass


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    serve_peers.add_arguments(parser)


def _run_serve(arguments: argparse.Namespace) -> int:
    return serve_peers.run(arguments) if arguments.peer else serve.run(arguments)


def _one_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="default, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--threads", type=int, help="CPU threads (all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="of each shape; medians are shown (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    _one_engine_arguments(parser)
    parser.add_argument("--dtype", default="int8", help="of the engine (%(default)s)")
    parser.add_argument("--batches", type=engine.counts, default=(1, 16), metavar="N,N", help="requests of decodes")
    parser.add_argument("--context", type=int, default=512, help="tokens before each decode (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill (%(default)s)")


def _tiles_arguments(parser: argparse.ArgumentParser) -> None:
    _one_engine_arguments(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="the modes with tiles")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def _run_step(arguments: argparse.Namespace) -> int:
    from tools.benchmarks import step  # brings torch, which the others do without

    return step.run(arguments)


def _run_tiles(arguments: argparse.Namespace) -> int:
    from tools.benchmarks import tiles  # brings torch, as above

    return tiles.run(arguments)


Add = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]
COMMANDS: dict[str, tuple[str, Add, Run]] = {
    "serve": (
        "latencies and throughput of a running server, or of ours beside llama-server",
        _serve_arguments,
        _run_serve,
    ),
    "engine": (
        "tokens/s and memory of the engine, beside llama.cpp and transformers",
        engine.add_arguments,
        engine.run,
    ),
    "policies": (
        "latencies under each scheduling policy, side by side on the real engine",
        policies.add_arguments,
        policies.run,
    ),
    "fidelity": ("the simulator beside the real engine, on the same arrivals", fidelity.add_arguments, fidelity.run),
    "start": ("from start to the first token, beside import torch", start.add_arguments, start.run),
    "perplexity": ("accuracy of each numeric mode", perplexity.add_arguments, perplexity.run),
    "step": ("where the time of one iteration goes", _step_arguments, _run_step),
    "tiles": ("what equal bits cost in the float modes", _tiles_arguments, _run_tiles),
    "peers": ("build llama.cpp, which others are compared with", _no_arguments, build.run),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure a running server, or its parts.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (text, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_arguments(command)
        command.set_defaults(run=run)
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes that a measurement started end with it
    try:
        return int(parsed.run(parsed))
    except ActorserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("bench: interrupted before anything was measured", file=sys.stderr)
        return serve.EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
