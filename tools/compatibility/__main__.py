"""``tools/clients [NAME ...]``: point real clients at our server, and print what works."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from actorserve.errors import ActorserveError
from tools.compatibility.clients import CHECKS, CLIENTS, Client
from tools.compatibility.default_model import weights, write_tokenizer
from tools.compatibility.environments import Environment
from tools.compatibility.errors import CompatibilityError, MissingProgramError
from tools.compatibility.reports import Check, read_report
from tools.compatibility.server import RunningServer, running_server
from tools.compatibility.vllm_tests.run import run_vllm_tests

KEY: Final = "key-of-the-clients"
WORKERS: Final[dict[str, str | int]] = {"max_context_tokens": 2048}  # so that a small model's endless answer ends soon
EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2  # nothing was checked
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Result:
    """What the checks of one client found."""

    client: str
    version: str
    checks: Sequence[Check]
    seconds: float


def check_clients(names: Sequence[str], is_verbose: bool) -> list[Result]:
    """Install clients and check them, one after the other. Those that need the same server share one.

    Raises: CompatibilityError, also if none of them can be installed.
    """
    outcomes = {
        environment: install(environment) for environment in {CLIENTS[name].environment: None for name in names}
    }
    missing = {name: check for name in names if (check := outcomes[CLIENTS[name].environment])}
    failures = [check.failure for check in missing.values() if check.failure]
    if failures and len(missing) == len(names):
        raise CompatibilityError(f"no client can be installed: {failures[0]}")
    results = [Result(name, "-", [check], 0.0) for name, check in missing.items()]
    installed = [name for name in names if name not in missing]
    for workers in dict.fromkeys(CLIENTS[name].workers for name in installed):
        with running_server(key=KEY, settings={"workers": WORKERS | dict(workers)}) as server:
            results += [
                check_client(name, CLIENTS[name], server, is_verbose)
                for name in installed
                if CLIENTS[name].workers == workers
            ]
    return results


def install(environment: Environment) -> Check | None:
    """Install an environment. Returns what stands in place of its clients' checks if that was not possible."""
    try:
        environment.install()
    except MissingProgramError as error:
        return Check("all", skipped=str(error))
    except CompatibilityError as error:
        return Check("installation", failure=str(error))
    return None


def check_client(name: str, client: Client, server: RunningServer, is_verbose: bool) -> Result:
    """Run the checks of a client that is installed. Raises: CompatibilityError."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clients-") as temporary:
        folder = Path(temporary)
        write_tokenizer(folder)
        variables = {
            "ACTORSERVE_URL": server.url,
            "ACTORSERVE_KEY": KEY,
            "ACTORSERVE_MODEL": server.model,
            "ACTORSERVE_TOKENIZER": str(folder),
            "ACTORSERVE_WEIGHTS": str(weights()),
        }
        report = folder / "report.xml"
        command = client.environment.command([CHECKS / file for file in client.checks], report)
        output = None if is_verbose else subprocess.DEVNULL
        subprocess.run(command, cwd=folder, env={**os.environ, **variables}, stdout=output, stderr=output, check=False)
        checks = read_report(report)
    return Result(name, client.environment.version(client.package), checks, time.monotonic() - began)


def check_with_vllm(checkout: Path, expression: str, is_verbose: bool) -> Result:
    """Run vLLM's own tests. Raises: CompatibilityError."""
    began = time.monotonic()
    checks = run_vllm_tests(checkout, expression, is_verbose)
    return Result("vLLM's tests", checkout.name, checks, time.monotonic() - began)


def print_results(console: Console, results: Sequence[Result]) -> None:
    """A table of the clients, then every check that failed or was skipped, with the reason."""
    table = Table("client", "version", "passed", "failed", "skipped", "seconds")
    for result in results:
        failed = sum(bool(check.failure) for check in result.checks)
        skipped = sum(bool(check.skipped) for check in result.checks)
        counts = (len(result.checks) - failed - skipped, failed, skipped)
        table.add_row(result.client, result.version, *(str(count) for count in counts), f"{result.seconds:.1f}")
    console.print(table)
    for result in results:
        for check in result.checks:
            if check.failure or check.skipped:
                outcome = f"failed: {check.failure}" if check.failure else f"skipped: {check.skipped}"
                console.print(
                    f"{result.client}: {check.name}: {outcome}", markup=False, highlight=False, soft_wrap=True
                )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/clients", description="Point real clients, unchanged, at our server, and print what works."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"clients to check; default: the quick ones of {', '.join(CLIENTS)}"
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="FOLDER", help="run vLLM's own tests of its server instead, from this checkout"
    )
    parser.add_argument("-k", dest="expression", default="", help="which of vLLM's tests to run, as pytest's -k")
    parser.add_argument("--verbose", action="store_true", help="show the output of the checks")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.names if name not in CLIENTS]:
        parser.error(f"unknown client {unknown[0]}; known: {', '.join(CLIENTS)}")
    names = parsed.names or [name for name, client in CLIENTS.items() if client.is_quick]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the server that it started
    try:
        if parsed.vllm:
            results = [check_with_vllm(parsed.vllm.resolve(), parsed.expression, parsed.verbose)]
        else:
            results = check_clients(names, parsed.verbose)
    except ActorserveError as error:
        print(f"clients: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("clients: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    print_results(Console(), results)
    return EXIT_FAILED if any(check.failure for result in results for check in result.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
