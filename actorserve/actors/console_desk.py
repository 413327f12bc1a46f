"""The coordinator's desk for operators: it takes their commands, checks what they may do, and keeps the audit file."""

import logging
import secrets
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
from actorserve.wire.curve.console_callers import KeyCallers
from actorserve.wire.trust import Trust

_AUDIT_LINES: Final = 50
_log: Final = logging.getLogger("actorserve.console")


class ConsoleDesk:
    """Answers at once what needs no core (``config``, ``audit``, what the caller may not do), and hands on the rest.

    ``settings`` gives the settings that apply, by their dotted names. ``server`` is for consoles on this host.
    """

    def __init__(self, server: ConsoleServer, audit: AuditFile, settings: Callable[[], Mapping[str, object]]) -> None:
        self._servers = [server]
        self._audit = audit
        self._settings = settings

    @property
    def audit(self) -> AuditFile:
        return self._audit

    def on_arrival(self, wake: Callable[[], None]) -> None:
        for server in self._servers:
            server.on_arrival(wake)

    def serve_elsewhere(self, address: str, trust: Trust) -> None:
        """Serve the consoles of operators and viewers on other hosts, too. Call it on the running event loop.

        Raises: ActorserveError when the socket cannot be bound.
        """
        self._servers.append(ConsoleServer(address, KeyCallers(trust, self.refused)))

    def refused(self, text: str) -> None:
        """Something was refused because of its key."""
        self._audit.write(Audit("unknown", Command(secrets.token_hex(8), "connect"), Outcome.REFUSED, text))

    def take(self) -> list[tuple[Peer, Command]]:
        """The commands that the core has to answer."""
        commands: list[tuple[Peer, Command]] = []
        for server in self._servers:
            commands += self._take(server)
        return commands

    def send(self, peer: Peer, answer: Answer) -> None:
        # A console is known to one server, because the callers of the two have different names.
        any(server.send(peer, answer) for server in self._servers)

    def _take(self, server: ConsoleServer) -> list[tuple[Peer, Command]]:
        commands: list[tuple[Peer, Command]] = []
        for peer, caller, command in server.take():
            if not may(caller.role, command.verb):
                text = f"{caller.name} is a {caller.role.value}, and {command.verb} needs an operator"
                server.send(peer, Answer(command.command_id, Outcome.REFUSED, text))
                self._audit.write(Audit(caller.name, command, Outcome.REFUSED, text))
                _log.warning("%s", text)
            elif command.verb in ("config", "audit") and problem_of(command) is None:
                server.send(peer, self._tell(command))
            else:
                commands.append((peer, command))
        return commands

    def write(self, act: Audit) -> None:
        """An act is done or was refused."""
        self._audit.write(act)
        _log.info("%s: %s %s: %s", act.caller, act.command.verb, " ".join(act.command.arguments), act.text)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._audit.close()

    def _tell(self, command: Command) -> Answer:
        if command.verb == "audit":
            num_lines = int(command.arguments[0]) if command.arguments else _AUDIT_LINES
            return Answer(command.command_id, Outcome.DONE, "", self._audit.table(num_lines))
        settings = self._settings()
        if not command.arguments:
            return Answer(command.command_id, Outcome.DONE, "", key_values(settings.items()))
        (wanted,) = command.arguments
        found = [(name, value) for name, value in settings.items() if name == wanted or name.startswith(f"{wanted}.")]
        if not found:
            text = f"there is no setting {wanted}{nearest(wanted, settings)}"
            return Answer(command.command_id, Outcome.REFUSED, text)
        return Answer(command.command_id, Outcome.DONE, "", key_values(found))


def open_desk(runtime_dir: Path, settings: Settings, settings_set: Callable[[], Mapping[str, object]]) -> ConsoleDesk:
    """The desk of the coordinator of a server with these settings, and with what operators have set. Call it on the
    running event loop.

    Raises: ActorserveError when the socket cannot be bound, or the audit file cannot be opened.
    """
    audit = AuditFile(settings.cluster.audit_dir or runtime_dir)
    server = ConsoleServer(console_address(runtime_dir))
    return ConsoleDesk(server, audit, lambda: flattened(settings.model_dump(mode="json")) | dict(settings_set()))


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
