"""``actorserve console``: an operator watches and steers a running server."""

import argparse
import sys
from collections.abc import Sequence

from actorserve.cluster.file import read_cluster_file
from actorserve.cluster.network import console_address
from actorserve.console.arguments import console_parser
from actorserve.console.find import NoServerError, find_address
from actorserve.console.outcome import Exit
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.errors import SettingsError
from actorserve.wire.console import ConsoleClient, ConsoleKeys
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import check_key


def main(arguments: Sequence[str]) -> int:
    """Run a verb, or open the prompt. Returns the exit status (``console.outcome.Exit``).

    Raises: ActorserveError when the address cannot be used, or another program answers there.
    """
    parsed = console_parser().parse_args(arguments)
    try:
        address, keys = _server(parsed)
    except NoServerError as error:
        print(f"actorserve console: {error}", file=sys.stderr)
        return Exit.TIMEOUT
    client = ConsoleClient(address, keys)
    try:
        runner = Runner(Session(client, parsed.timeout), _confirm if sys.stdin.isatty() else None)
        if parsed.verb is not None:
            return runner.run(parsed)
        from actorserve.console.prompt import read_lines  # prompt_toolkit takes long to load

        return read_lines(runner)
    except KeyboardInterrupt:
        return Exit.DONE
    finally:
        client.close()


def _server(parsed: argparse.Namespace) -> tuple[str, ConsoleKeys | None]:
    """The server's address, and the keys for a server elsewhere.

    Raises: NoServerError if no server is found on this host; SettingsError if a key is missing, or the cluster's file
    is wrong; TrustError if a key cannot be used.
    """
    if parsed.cluster is not None:
        cluster = read_cluster_file(parsed.cluster)
        address, server_key = console_address(cluster), cluster.coordinator_host.public_key
        if server_key is None:
            raise SettingsError(f"{parsed.cluster}: host {cluster.coordinator_host.name} has no public_key")
    elif parsed.connect is not None:
        address, server_key = parsed.connect, parsed.server_key
    else:
        return find_address(parsed.runtime_dir), None
    if not address.startswith("tcp://"):
        return address, None
    if parsed.key is None or server_key is None:
        raise SettingsError(f"{address} needs keys: --key and --server-key, or --key and --cluster")
    check_key(server_key, "the key of the server")
    own = read_key_file(parsed.key)
    return address, ConsoleKeys(own.public_key, own.secret_key, server_key)


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
