"""``actorserve console``: an operator watches and steers a running server."""

import sys
from collections.abc import Sequence

from actorserve.console.arguments import console_parser
from actorserve.console.find import NoServerError, find_address
from actorserve.console.outcome import Exit
from actorserve.console.run import Runner
from actorserve.console.session import Session
from actorserve.wire.console import ConsoleClient


def main(arguments: Sequence[str]) -> int:
    """Run a verb, or open the prompt. Returns the exit status (``console.outcome.Exit``).

    Raises: ActorserveError when the address cannot be used, or another program answers there.
    """
    parsed = console_parser().parse_args(arguments)
    try:
        address = parsed.connect or find_address(parsed.runtime_dir)
    except NoServerError as error:
        print(f"actorserve console: {error}", file=sys.stderr)
        return Exit.TIMEOUT
    client = ConsoleClient(address)
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


def _confirm(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
