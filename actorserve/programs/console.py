"""``actorserve console``: an operator watches and steers a running server."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress

from actorserve.cluster.file import read_cluster_file
from actorserve.cluster.network import console_addresses
from actorserve.console.arguments import HELP, console_parser
from actorserve.console.coordinators import Coordinators
from actorserve.console.find import NoServerError, find_address
from actorserve.console.help import help_text
from actorserve.console.outcome import Exit
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.core.operations.verbs import VERBS
from actorserve.errors import SettingsError
from actorserve.wire.console import ConsoleClient, ConsoleKeys
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import check_key


def main(arguments: Sequence[str]) -> int:
    """Run a verb, or open the prompt. Returns the exit status (``console.outcome.Exit``).

    Raises: ActorserveError when the address cannot be used, or another program answers there.
    """
    parser = console_parser()
    parsed = parser.parse_args(arguments)
    if parsed.verb == HELP:
        return _help(parsed.about)
    if parsed.verb is None and parsed.json:
        parser.error("--json needs a verb: the prompt takes it after the verbs")
    try:
        servers = _servers(parsed)
    except NoServerError as error:
        print(f"actorserve console: {error}", file=sys.stderr)
        return Exit.TIMEOUT
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(ConsoleClient(address, keys))) for address, keys in servers]
        stack.enter_context(suppress(KeyboardInterrupt))
        asker = clients[0] if len(clients) == 1 else Coordinators(clients)
        runner = Runner(Session(asker, parsed.timeout), _confirm if sys.stdin.isatty() else None)
        if parsed.verb is not None:
            return runner.run(parsed)
        from actorserve.console.prompt import read_lines  # prompt_toolkit takes long to load

        return read_lines(runner)
    return Exit.DONE


def _help(about: str | None) -> int:
    """Tell of a verb, or of all. It needs no server."""
    if about is not None and about not in VERBS:
        print(f"actorserve console: {help_text([about])}", file=sys.stderr)
        return Exit.USAGE
    print(help_text() if about is None else help_text([about]))
    return Exit.DONE


def _servers(parsed: argparse.Namespace) -> list[tuple[str, ConsoleKeys | None]]:
    """The coordinators' addresses, and the keys for those elsewhere.

    Raises: NoServerError if no server is found on this host; SettingsError if a key is missing, or the cluster's file
    is wrong; TrustError if a key cannot be used.
    """
    if parsed.cluster is not None:
        cluster = read_cluster_file(parsed.cluster)
        addresses = console_addresses(cluster)
        keyless = [name for name in addresses if cluster.host(name).public_key is None]
        if keyless:
            raise SettingsError(f"{parsed.cluster}: host {keyless[0]} has no public_key")
        return [(address, _keys(parsed, address, cluster.host(name).public_key)) for name, address in addresses.items()]
    if parsed.connect is None:
        return [(find_address(parsed.runtime_dir), None)]
    is_elsewhere = parsed.connect.startswith("tcp://")
    return [(parsed.connect, _keys(parsed, parsed.connect, parsed.server_key) if is_elsewhere else None)]


def _keys(parsed: argparse.Namespace, address: str, server_key: str | None) -> ConsoleKeys:
    if parsed.key is None or server_key is None:
        raise SettingsError(f"{address} needs keys: --key and --server-key, or --key and --cluster")
    check_key(server_key, "the key of the server")
    own = read_key_file(parsed.key)
    return ConsoleKeys(own.public_key, own.secret_key, server_key)


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
