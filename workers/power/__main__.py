"""``actorserve power``: the actuator of power caps on this host."""

import argparse
import logging
import sys
from pathlib import Path

from actorserve import logs
from actorserve.cluster.file import DEFAULT_CLUSTER_FILE, read_cluster_file
from actorserve.core.power.actuator import ActuatorConfig
from actorserve.errors import ActorserveError
from actorserve.processes.child import Child
from actorserve.processes.units.systemd import attach_to_systemd
from actorserve.settings import load_settings
from workers.power.actuator import NAME, run_actuator
from workers.power.nvml import open_gpus

_STATE = Path("/var/lib/actorserve-power")
_log = logging.getLogger("actorserve.power")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="actorserve power",
        description="Set the power caps of this host's GPUs, as the coordinator says. It needs root. When it ends, and "
        "after a crash when it starts again, the GPUs get their former limits back.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file, as of the server")
    parser.add_argument(
        "--host", metavar="NAME", help="this host's name in the cluster's file; without it, a server on this host alone"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        default=DEFAULT_CLUSTER_FILE,
        help=f"the cluster's file ({DEFAULT_CLUSTER_FILE})",
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the actuator's secret key (/etc/actorserve/keys/NAME.actuator), if there are keys",
    )
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        default=Path("/run/actorserve"),
        metavar="DIR",
        help="the server's runtime folder (/run/actorserve), without --host",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=_STATE, metavar="DIR", help=f"folder for the former limits ({_STATE})"
    )
    return parser


def main() -> int:
    """Run the actuator. Returns the exit status."""
    arguments = _parser().parse_args()
    reporter = attach_to_systemd()
    try:
        settings = load_settings(arguments.config)
        logs.configure(NAME, settings.log.level, settings.log.format)
        budget_watts = settings.power.budget_watts
        child = Child(NAME, settings, arguments.runtime_dir, reporter)
        if arguments.host is not None:
            cluster = read_cluster_file(arguments.cluster)
            host = cluster.host(arguments.host)
            budget_watts = host.budget_watts
            key = arguments.key or DEFAULT_CLUSTER_FILE.with_name("keys") / f"{host.name}.actuator"
            child = Child(
                f"{host.name}/{NAME}",
                settings,
                arguments.state_dir,
                reporter,
                cluster_file=arguments.cluster,
                host=host.name,
                cluster_source=arguments.cluster,
                key_file=key if host.public_key is not None else None,
            )
        gpus = open_gpus()
        if isinstance(gpus, str):
            _log.warning("no GPU can be read or capped here: %s", gpus)
        config = ActuatorConfig(budget_watts, settings.power.alone_after_s)
        run_actuator(child, None if isinstance(gpus, str) else gpus, arguments.state_dir, config)
    except (ActorserveError, OSError) as error:
        text = logs.one_line(str(error))
        reporter.failed(text)
        sys.stderr.write(f"actorserve power: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
