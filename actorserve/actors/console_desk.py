"""The coordinator's desk for operators: it takes their commands, checks what they may do, and keeps the audit file."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from actorserve.actors.audit import AuditFile
from actorserve.core.effects import Audit
from actorserve.core.messages import Answer, Command, Outcome, Peer
from actorserve.core.operations.tables import key_values
from actorserve.core.operations.verbs import CALLER_PREFIX, may, nearest, problem_of
from actorserve.settings import Settings
from actorserve.wire.console import ConsoleServer, console_address

_AUDIT_LINES: Final = 50
_log: Final = logging.getLogger("actorserve.console")


class ConsoleDesk:
    """Answers at once what needs no core (``config``, ``audit``, what the caller may not do), and hands on the rest.

    ``settings`` gives the settings that apply, by their dotted names.
    """

    def __init__(self, server: ConsoleServer, audit: AuditFile, settings: Callable[[], Mapping[str, object]]) -> None:
        self._server = server
        self._audit = audit
        self._settings = settings
        self._changed: dict[str, object] = {}  # settings that operators have set since the start

    @property
    def audit(self) -> AuditFile:
        return self._audit

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._server.on_arrival(wake)

    def take(self) -> list[tuple[Peer, Command]]:
        """The commands that the core has to answer."""
        commands: list[tuple[Peer, Command]] = []
        for peer, caller, command in self._server.take():
            if not may(caller.role, command.verb):
                text = f"{caller.name} is a {caller.role.value}, and {command.verb} needs an operator"
                self._server.send(peer, Answer(command.command_id, Outcome.REFUSED, text))
                self._audit.write(Audit(caller.name, command, Outcome.REFUSED, text))
                _log.warning("%s", text)
            elif command.verb in ("config", "audit") and problem_of(command) is None:
                self._server.send(peer, self._tell(command))
            else:
                commands.append((peer, command))
        return commands

    def send(self, peer: Peer, answer: Answer) -> None:
        self._server.send(peer, answer)

    def write(self, act: Audit) -> None:
        """An act is done or was refused."""
        self._audit.write(act)
        if act.command.verb == "set" and act.outcome is Outcome.DONE:
            setting, value = act.command.arguments
            self._changed[setting] = value
        _log.info("%s: %s %s: %s", act.caller, act.command.verb, " ".join(act.command.arguments), act.text)

    def close(self) -> None:
        self._server.close()
        self._audit.close()

    def _tell(self, command: Command) -> Answer:
        if command.verb == "audit":
            num_lines = int(command.arguments[0]) if command.arguments else _AUDIT_LINES
            return Answer(command.command_id, Outcome.DONE, "", self._audit.table(num_lines))
        settings = dict(self._settings()) | self._changed
        if not command.arguments:
            return Answer(command.command_id, Outcome.DONE, "", key_values(settings.items()))
        (wanted,) = command.arguments
        found = [(name, value) for name, value in settings.items() if name == wanted or name.startswith(f"{wanted}.")]
        if not found:
            text = f"there is no setting {wanted}{nearest(wanted, settings)}"
            return Answer(command.command_id, Outcome.REFUSED, text)
        return Answer(command.command_id, Outcome.DONE, "", key_values(found))


def open_desk(runtime_dir: Path, settings: Settings) -> ConsoleDesk:
    """The desk of the coordinator of a server with these settings. Call it on the running event loop.

    Raises: ActorserveError when the socket cannot be bound, or the audit file cannot be opened.
    """
    audit = AuditFile(settings.cluster.audit_dir or runtime_dir)
    server = ConsoleServer(console_address(runtime_dir))
    return ConsoleDesk(server, audit, lambda: flattened(settings.model_dump(mode="json")))


def flattened(values: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """The settings by their dotted names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{above}{name}.")
        else:
            flat[above + name] = "not set" if value is None else value
    return flat


def is_caller(peer: Peer) -> bool:
    """Whether this is the core's name of a console."""
    return peer.name.startswith(CALLER_PREFIX)
