"""``tools/bench``: measurements, one subcommand each."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from actorserve.errors import ActorserveError
from tools.benchmarks import (
    actors,
    checkpoints,
    coordinator,
    engine,
    fidelity,
    migration,
    perplexity,
    policies,
    serve,
    serve_peers,
    start,
)
from tools.benchmarks.peers import build, ray_build

EXIT_UNUSABLE = 2  # nothing was measured


def _peers_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", nargs="?", choices=("llama.cpp", "ray"), default="llama.cpp", help="(%(default)s)")


def _run_peers(arguments: argparse.Namespace) -> int:
    if arguments.peer == "llama.cpp":
        return build.run(arguments)
    ray_build.ensure_ray(Console())
    return 0


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


def _transport_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=64, help="of KV that is read each time (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are shown (%(default)s)")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (%(default)s)")
    parser.add_argument("--pieces", type=int, default=180, help="layers x 2 x KV heads (%(default)s: SmolLM2-135M)")
    parser.add_argument("--token-bytes", type=int, default=128, help="of a piece, for one token (%(default)s)")
    parser.add_argument("--scattered", action="store_true", help="blocks in any order, not as neighbours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def _run_transport(arguments: argparse.Namespace) -> int:
    from tools.benchmarks import transport  # brings torch, as above

    return transport.run(arguments)


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
    "actors": ("calls between actors and their memory, beside Ray and pyzmq alone", actors.add_arguments, actors.run),
    "coordinator": ("requests per second that it places, at many workers", coordinator.add_arguments, coordinator.run),
    "checkpoints": (
        "what a worker's death costs a running request, with and without KV checkpoints",
        checkpoints.add_arguments,
        checkpoints.run,
    ),
    "migration": ("what moving a running request costs it and others", migration.add_arguments, migration.run),
    "transport": ("GB/s of KV from worker to worker, beside a plain copy", _transport_arguments, _run_transport),
    "peers": ("build what others are compared with: llama.cpp, or Ray", _peers_arguments, _run_peers),
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
