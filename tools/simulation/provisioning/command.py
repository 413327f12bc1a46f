"""The command ``tools/simulate provision FILE``."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.figures.files import measured_now, write_figures
from tools.profiling.output import prepare_file
from tools.simulation.provisioning.plan import read_provisioning
from tools.simulation.provisioning.running import Tried, provision
from tools.simulation.result_files import JSON_NAME, write_results


def run_provisioning(parsed: argparse.Namespace, overrides: Mapping[str, Any], console: Console) -> int:
    """Raises: ActorserveError, OSError."""
    provisioning = read_provisioning(parsed.config, overrides)
    folder = parsed.out or Path("simulated") / provisioning.name
    prepare_file(folder / JSON_NAME)
    found = provision(provisioning, min(parsed.processes, len(provisioning.designs)), _tell)
    from tools.simulation.provisioning.output import as_values, show, table_of, write_plot  # matplotlib takes a while

    files = [write_results(as_values(provisioning, found), folder)]
    show(provisioning, found, console)
    files.append(write_plot(provisioning, found, folder))
    if parsed.json is not None:
        write_figures(measured_now(parsed.command_line, [table_of(provisioning, found)]), parsed.json)
        files.append(parsed.json)
    console.print("written:", *map(str, files), soft_wrap=True)
    return 0


def _tell(tried: Tried) -> None:
    counts = " + ".join(map(str, tried.counts))
    told = "held" if tried.is_held else f"breaks {', '.join(tried.breaks) or 'completion'}"
    print(f"{tried.design} with {counts} machines, seed {tried.seed}: {told}", file=sys.stderr)
