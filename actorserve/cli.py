"""The command line: what a person types, and the child processes that ``actorserve serve`` starts.

A process imports only what its own command needs, because a coordinator that died is then back sooner.
"""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from actorserve import logs
from actorserve.errors import ActorserveError

EXIT_FAILED = 1

CHILDREN = {"coordinator": "actorserve.programs.coordinator", "gateway": "actorserve.programs.gateway"}
"""Process name -> module whose ``main(child)`` it runs."""


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Imports take a while. A Ctrl-C in that time ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _child_main(name: str, arguments: Sequence[str]) -> int:
    gc.disable()  # what is imported stays, so looking for garbage meanwhile takes a tenth of the time for nothing
    with _ends_quietly():
        from actorserve.processes.child import run_child

        module = importlib.import_module(CHILDREN[name])
    gc.freeze()  # the search for garbage leaves it out later, too: a whole search took 35 ms
    gc.enable()
    return run_child(f"actorserve {name}", arguments, module.main)


def _process_main(arguments: Sequence[str]) -> int:
    with _ends_quietly():
        from actorserve.processes.units.process_file import main
    main(arguments)


def _power_main(arguments: Sequence[str]) -> int:
    with _ends_quietly():
        from actorserve.processes.launch import python_command
    words = (*python_command(), "workers.power", *arguments)
    os.execv(words[0], words)  # a program of its own, because only workers' programs may load NVML


def _console_main(arguments: Sequence[str]) -> int:
    with _ends_quietly():
        from actorserve.programs.console import main
    try:
        status = main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # because Python flushes it once more
        return EXIT_FAILED
    return status


def _command_main(arguments: Sequence[str]) -> int:
    with _ends_quietly():
        from actorserve.commands import run_command
    return run_command(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status. A failure prints one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        match given:
            case [name, *rest] if name in CHILDREN:
                return _child_main(name, rest)
            case ["console", *rest]:
                return _console_main(rest)
            case ["process", *rest]:
                return _process_main(rest)
            case ["power", *rest]:
                return _power_main(rest)
        return _command_main(given)
    except ActorserveError as error:
        print(f"actorserve: {logs.one_line(str(error))}", file=sys.stderr)
        return EXIT_FAILED
