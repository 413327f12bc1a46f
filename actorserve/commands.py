"""The commands of a person that need most of the server: ``actorserve serve``, ``host``, ``keys`` and the others."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from actorserve import __version__, logs
from actorserve.cluster.file import DEFAULT_CLUSTER_FILE
from actorserve.programs.config_check import USUAL_FILES, check_files
from actorserve.programs.keys import HOLDERS, host_key_file, make_keys
from actorserve.programs.serve import serve, serve_host
from actorserve.settings import Settings, load_settings

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # a shell's status for a process that Ctrl-C ended


def _serve_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with an OpenAI-compatible API. Options override the settings file.",
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000); 0 takes a free one")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (one per GPU; two without a GPU)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file; config/actorserve.toml shows all settings"
    )
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="default, a GGUF file, a Hugging Face folder, or org/name on a hub"
    )
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="dummy: random weights, for measuring (auto)")
    parser.add_argument("--model-name", metavar="NAME", help="the name that clients ask for (the model's own)")
    parser.add_argument("--chat-template", metavar="FILE", help="a file with a chat template (the model's own)")
    parser.add_argument(
        "--model-alias", action="append", metavar="NAME", help="a further name that clients may ask for; repeatable"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="device that workers compute on (auto)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "int8", "int4", "float32", "bfloat16"),
        help="number format that workers compute with (auto: int8 on CPUs, bfloat16 on GPUs)",
    )
    _add_folders(parser)
    parser.add_argument("--engine", choices=("torch", "fake"), help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)


def _host_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "host",
        help="run one host's share of a cluster",
        description="Run what the cluster's file says of this host: a coordinator, gateways, workers.",
    )
    parser.add_argument("name", metavar="NAME", help="the host's name in the cluster's file")
    parser.add_argument(
        "--cluster",
        type=Path,
        default=DEFAULT_CLUSTER_FILE,
        metavar="FILE",
        help=f"the cluster's file ({DEFAULT_CLUSTER_FILE})",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file; config/actorserve.toml shows all settings"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help=f"the host's secret key ({host_key_file('NAME')}), if there are keys"
    )
    _add_folders(parser)
    parser.set_defaults(run=_host)


def _keys_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="make a key pair",
        description="Make the key pair of a host, an operator, a viewer, or a host's actuator of power caps. The "
        "secret key goes to a file that only you may read; the line with the public key is for the cluster's file.",
    )
    holder = parser.add_mutually_exclusive_group(required=True)
    for kind, text in HOLDERS.items():
        holder.add_argument(f"--{kind}", metavar="NAME", help=text)
    usual = f"{host_key_file('NAME')} for hosts, ~/.config/actorserve/NAME.key for people"
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the file of the secret key ({usual})")
    parser.set_defaults(run=_keys)


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="runtime folder, by which the console finds the server"
    )
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="DIR",
        help="start nothing: download the model, share out the devices, and keep in this runtime folder how to start "
        "each process (actorserve process), for units of systemd",
    )


def _config_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("config", help="check settings and cluster files")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    check = verbs.add_parser(
        "check",
        help="find mistakes in files, and start nothing",
        description="Find mistakes in settings and cluster files, and start nothing. Exit status: 0 if there are none, "
        "1 if there are some, 2 for a wrong command line.",
    )
    usual = " and ".join(map(str, USUAL_FILES))
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"files to check ({usual})")
    check.add_argument(
        "--key", type=Path, metavar="FILE", help=f"a host's secret key ({host_key_file('HOST')}, where there is one)"
    )
    check.set_defaults(run=lambda arguments: _check_config(check, arguments))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorserve", description="An LLM inference server for bare metal.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _serve_parser(commands)
    _host_parser(commands)
    _config_parser(commands)
    _keys_parser(commands)
    # cli.main runs these itself
    commands.add_parser("process", help="run one process of a prepared server")
    commands.add_parser("console", help="watch and steer a running server")
    commands.add_parser("power", help="set the power caps of this host's GPUs, as root")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    return load_settings(
        arguments.config,
        {
            "http": {"host": arguments.host, "port": arguments.port},
            "model": {
                "path": arguments.model,
                "name": arguments.model_name,
                "aliases": arguments.model_alias,
                "chat_template": arguments.chat_template,
                "load_format": arguments.load_format,
                "dtype": arguments.dtype,
            },
            "cluster": {"runtime_dir": arguments.prepare or arguments.runtime_dir},
            "workers": {"count": arguments.workers, "device": arguments.device, "engine": arguments.engine},
        },
    )


def _serve(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    logs.configure("serve", settings.log.level, settings.log.format)
    return 0 if serve(settings, prepares=arguments.prepare is not None) else EXIT_INTERRUPTED


def _host(arguments: argparse.Namespace) -> int:
    prepares = arguments.prepare is not None
    runtime_dir = arguments.prepare or arguments.runtime_dir
    settings = load_settings(arguments.config, {"cluster": {"runtime_dir": runtime_dir}})
    logs.configure("serve", settings.log.level, settings.log.format)
    key_file = arguments.key or host_key_file(arguments.name)
    is_done = serve_host(settings, arguments.cluster, arguments.name, key_file, prepares=prepares)
    return 0 if is_done else EXIT_INTERRUPTED


def _keys(arguments: argparse.Namespace) -> int:
    given = {kind: getattr(arguments, kind) for kind in HOLDERS}
    ((kind, name),) = ((kind, name) for kind, name in given.items() if name is not None)
    make_keys(kind, name, arguments.out, sys.stdout)
    return 0


def _check_config(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    files = arguments.files or [file for file in USUAL_FILES if file.exists()]
    if not files:
        parser.error(f"expected a file, because there is neither {' nor '.join(map(str, USUAL_FILES))}")
    return 0 if check_files(files, sys.stdout, arguments.key) else EXIT_FAILED


def run_command(given: Sequence[str]) -> int:
    """Run the command that these arguments give. Returns the exit status. Raises: ActorserveError if it fails."""
    parsed = build_parser().parse_args(given)
    logs.configure("serve")
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print("actorserve: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
