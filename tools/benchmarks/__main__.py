"""``tools/bench COMMAND``: the list of commands. Each command is a module that owns its arguments."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from actorserve.errors import ActorserveError
from tools.figures.files import command_line

EXIT_UNUSABLE = 2  # nothing was measured
EXIT_INTERRUPTED = 130

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serving.serve", "latencies and throughput of a running server, or of ours and llama-server"),
    "engine": ("engine.engine", "tokens/s and memory of the engine, compared with llama.cpp and transformers"),
    "ahead": ("serving.ahead", "what planning one iteration ahead gains, and what it costs"),
    "policies": ("serving.policies", "latencies under each scheduling policy, side by side on the real engine"),
    "fidelity": ("fidelity.fidelity", "the simulator compared with the real engine: schedule, profile, end to end"),
    "splitwise-sim": ("simulators.splitwise_sim", "the simulator compared with SplitwiseSim, rule by rule"),
    "splitwise-sim-runs": ("simulators.splitwise_sim_runs", "SplitwiseSim's designs, beside its own runs on file"),
    "simulator": ("simulators.speed", "requests that the simulator serves per CPU second, interpreted and compiled"),
    "start": ("serving.start", "from a process's start to the first token, compared with import torch"),
    "perplexity": ("engine.perplexity", "accuracy of each numeric mode"),
    "step": ("engine.step", "where the time of one iteration goes"),
    "launches": ("engine.launches", "what one step launches, copies and waits for on a GPU, counted without one"),
    "structured": ("structured.structured", "time per token with a JSON schema, and whether the answers are valid"),
    "tiles": ("engine.tiles", "what batch-independent bits cost in the float modes"),
    "gpu": ("gpu.gpu", "how far the engine is from a GPU's own speed, on a model of random weights"),
    "batching": (
        "gpu.batching",
        "our server's output on a GPU, compared with transformers' continuous batching and vLLM",
    ),
    "kernels": ("kernels.kernels", "registers, spills and shared memory of the Triton kernels, without a GPU"),
    "actors": ("cluster.actors", "calls between actors and their memory, compared with Ray and bare pyzmq"),
    "coordinator": ("cluster.coordinator", "requests per second that the coordinator places, with many workers"),
    "top": ("cluster.top", "what the console's live view of a thousand workers costs the coordinator"),
    "failover": ("cluster.failover", "how soon another coordinator places requests when one is killed under streams"),
    "rolling": ("rolling.rolling", "what clients see while each process of a server is restarted in turn"),
    "gateway": ("gateway.streams", "events/s that a gateway streams, compared with hypercorn and starlette alone"),
    "dashboard": ("gateway.dashboard", "what open pages of the dashboard cost the gateway"),
    "clients": ("gateway.clients", "what idle, unread and refused clients cost others; memory of an idle stream"),
    "soak": ("soak.soak", "random chats for an hour, of which a third hang up: errors, and memory that grows"),
    "transport": ("cluster.transport", "GB/s of KV from worker to worker, compared with a plain copy"),
    "keys": ("cluster.keys", "messages/s and GB/s of KV with keys (CURVE), compared with plain sockets"),
    "power": ("power.power", "how fast the power governor corrects, and what it gains over even caps, on fake GPUs"),
    "power-budget": ("power.budget", "from a budget at the console to limits in the driver, with real processes"),
    "migration": ("migration.migration", "what moving a running request costs the request and its neighbours"),
    "handoff": (
        "migration.handoff",
        "what it costs a request that one worker computes its prompt and another one its tokens",
    ),
    "checkpoints": ("migration.checkpoints", "what a worker's death costs a request, with and without KV checkpoints"),
    "mutants": ("mutants.mutants", "whether the random faults of the tests find bugs that are put into the core"),
    "peers": ("peers.peers", "build or install the systems to compare with: llama.cpp, Ray, or SplitwiseSim"),
    "report": ("tools.figures.report", "write the README tables from the figure files"),
}
"""Each command's module, relative to this package unless it begins with ``tools.``, and its help."""


class Command(Protocol):
    """The functions that a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure and report. Returns the exit status. Raises: ActorserveError, KeyboardInterrupt."""
        ...


def load(name: str) -> Command:
    module = COMMANDS[name][0]
    return cast(Command, importlib.import_module(module if module.startswith("tools.") else f"{__package__}.{module}"))


def make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Only the chosen command's module is imported, because some of them import torch."""
    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure a running server, or its parts.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            module = load(name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser(given[0] if given and given[0] in COMMANDS else None)
    parsed = parser.parse_args(given)
    parsed.command_line = command_line("tools/bench", given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a measurement ends the processes it started
    try:
        return int(parsed.run(parsed))
    except ActorserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("bench: interrupted before anything was measured", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
