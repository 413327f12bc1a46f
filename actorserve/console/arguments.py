"""The command line of the console, made from the table of verbs."""

import argparse
from pathlib import Path
from typing import Final, NoReturn

from actorserve.core.operations.verbs import VERBS, Verb

DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_WAIT_S: Final = 600.0
WAITS: Final = {"drain": "wait until the requests have left", "restart": "wait until the worker is back"}
HELP: Final = "help"
"""It stands in the place of a verb, and needs no server."""
FOLLOWS: Final = {"events": "go on with new events", "top": ""}


class UsageError(Exception):
    """A line of the prompt is no correct command. Its text is for a person."""


class _RaisingParser(argparse.ArgumentParser):
    """For lines of the prompt, which must not end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (usage: {self.format_usage().removeprefix('usage: ').strip()})")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(message or "")


def console_parser() -> argparse.ArgumentParser:
    """The parser of ``actorserve console``. Without a verb it opens the prompt."""
    parser = argparse.ArgumentParser(
        prog="actorserve console",
        description="Watch and steer a running server. Without a verb it opens a prompt.",
        epilog="Exit status: 0 done, 1 refused, 2 wrong usage, 3 no answer in time.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--runtime-dir", type=Path, metavar="DIR", help="the folder of a server's sockets on this host")
    where.add_argument("--connect", metavar="ADDRESS", help="the address of a server elsewhere: tcp://alpha:7481")
    where.add_argument(
        "--cluster", type=Path, metavar="FILE", help="the cluster's file, which has a server's address and its key"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="your secret key, for a server elsewhere")
    parser.add_argument("--server-key", metavar="KEY", help="the public key of the host in --connect")
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="S", help="how long to wait for an answer (5)"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object a line, as after the verb")
    asked = _add_verbs(parser, required=False).add_parser(HELP, help="the verbs, or one of them")
    asked.add_argument("about", nargs="?", metavar="VERB", help="the verb to tell of (all)")
    return parser


def line_parser() -> argparse.ArgumentParser:
    """The parser of the prompt's lines. Raises: UsageError, from ``parse_args``."""
    parser = _RaisingParser(prog="", add_help=False)
    parser.set_defaults(json=False)
    _add_verbs(parser, required=True)
    return parser


def _add_verbs(
    parser: argparse.ArgumentParser, *, required: bool
) -> "argparse._SubParsersAction[argparse.ArgumentParser]":
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=required)
    for verb in VERBS.values():
        _add_verb(
            verbs.add_parser(verb.name, help=verb.help, description=f"{verb.help[0].upper()}{verb.help[1:]}."), verb
        )
    return verbs


def _add_verb(parser: argparse.ArgumentParser, verb: Verb) -> None:
    for number, parameter in enumerate(verb.parameters):
        nargs = "?" if parameter.is_optional else None
        parser.add_argument(f"argument{number}", metavar=parameter.name, nargs=nargs, help=parameter.kind.value)
    # Without a default, because it would undo a --json before the verb.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="write one JSON object a line")
    if verb.acts:
        parser.add_argument("--dry-run", action="store_true", help="check, and say what would be done")
        parser.add_argument("--id", metavar="ID", help="repeat the command with this id, which acts once")
    if verb.destroys:
        parser.add_argument("--yes", action="store_true", help="do not ask first")
    if verb.name in WAITS:
        parser.add_argument("--wait", action="store_true", help=WAITS[verb.name])
        parser.add_argument(
            "--wait-s", type=_seconds, default=DEFAULT_WAIT_S, metavar="S", help="how long to wait at most (600)"
        )
    if verb.name == "events":
        parser.add_argument("--follow", action="store_true", help="go on with new events until Ctrl-C")
    if verb.name == "top":
        parser.add_argument("--once", action="store_true", help="print once, and end")
        parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="time between two pictures (1)")
        parser.add_argument("--sort", default="worker", metavar="COLUMN", help="the column to sort by (worker)")


def arguments_of(parsed: argparse.Namespace) -> list[str]:
    """The verb's arguments, in order."""
    parameters = VERBS[parsed.verb].parameters
    given = [getattr(parsed, f"argument{number}") for number in range(len(parameters))]
    return [value for value in given if value is not None]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds above 0")
    return value
