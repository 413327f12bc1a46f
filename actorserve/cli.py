"""The command line: ``actorserve serve`` for a person, and the processes that it starts."""

import argparse
import asyncio
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from actorserve import __version__, logs
from actorserve.errors import ActorserveError
from actorserve.http.api_keys import read_api_keys
from actorserve.model_files.describe import describe
from actorserve.model_files.locate import locate
from actorserve.processes import child, launch
from actorserve.processes.console import ProgressDisplay, StartDisplay, usage_text
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.supervisor import ChildSpec, Supervisor, listen_to_signals
from actorserve.settings import Settings, load_settings

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # what a shell says of a process that Ctrl-C ended

CHILDREN = {"coordinator": "actorserve.actors.coordinator", "gateway": "actorserve.http.gateway"}
"""Processes that ``serve`` starts, and the modules whose ``main(child)`` they run, each loaded by its process alone."""


def _serve_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with an OpenAI-compatible API. Options win over the settings file.",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000); 0 takes a free one")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (one per GPU; two without a GPU)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; config/actorserve.toml shows them all")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="default, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="dummy: random weights, for measuring (auto)")
    parser.add_argument("--model-name", metavar="NAME", help="the name that clients ask for (the model's own)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where workers compute (auto)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "int8", "int4", "float32", "bfloat16"),
        help="numbers that workers compute with (auto: int8 on CPUs, bfloat16 on GPUs)",
    )
    parser.add_argument("--engine", choices=("torch", "fake"), help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorserve", description="An LLM inference server for bare metal.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _serve_parser(commands)
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    return load_settings(
        arguments.config,
        {
            "http": {"host": arguments.host, "port": arguments.port},
            "model": {
                "path": arguments.model,
                "name": arguments.model_name,
                "load_format": arguments.load_format,
                "dtype": arguments.dtype,
            },
            "workers": {"count": arguments.workers, "device": arguments.device, "engine": arguments.engine},
        },
    )


def _bring_model(settings: Settings, display: ProgressDisplay) -> Settings:
    """Settings with the model's place on disk and its name, after it was downloaded where needed."""
    load_format = settings.model.load_format
    path = locate(
        settings.model.path, lambda done, total: display.update("model", "downloading", done / total), load_format
    )
    name = settings.model.name or describe(path, load_format).name
    return launch.replace(settings, "model", path=str(path), name=name)


def _serve(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until children run, it ends us as Ctrl-C does
    # First what is quick to find out, so that nobody waits for a download to learn that the port is in use.
    if settings.http.api_keys_file is not None:
        read_api_keys(settings.http.api_keys_file)
    port = launch.free_port(settings.http.host, settings.http.port)
    settings = launch.replace(settings, "http", port=port)
    with ProgressDisplay(Console(stderr=True)) as display:
        settings, placement = launch.resolve_workers(settings)
        settings = _bring_model(settings, display)
        with launch.runtime_dir(settings) as runtime_dir:
            settings_file = runtime_dir / "settings.json"
            child.write_settings(settings, settings_file)
            specs, spare = launch.child_specs(placement, settings_file, runtime_dir)
            host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
            usage = usage_text(f"http://{host}:{port}", settings.model.name or "")
            return asyncio.run(_supervise(specs, spare, settings, StartDisplay(display, usage)))


async def _supervise(
    specs: Sequence[ChildSpec], spare: Sequence[ChildSpec], settings: Settings, listener: StartDisplay
) -> int:
    rules = settings.supervision
    supervisor = Supervisor(
        specs,
        RestartLimits(rules.max_restarts, rules.window_s, rules.backoff_s, rules.max_backoff_s),
        listener,
        settings.cluster.drain_timeout_s,
        spare,
    )
    listen_to_signals(supervisor)
    await supervisor.run()
    return EXIT_INTERRUPTED if supervisor.was_killed else 0


def _child_main(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(CHILDREN[name])
    return child.run_child(f"actorserve {name}", arguments, module.main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; a failure is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in CHILDREN:
        return _child_main(given[0], given[1:])
    parsed = build_parser().parse_args(given)
    logs.configure("serve")
    try:
        return int(parsed.run(parsed))
    except ActorserveError as error:
        print(f"actorserve: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("actorserve: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
