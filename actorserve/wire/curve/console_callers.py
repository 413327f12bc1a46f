"""The callers of a console's socket that other machines reach: operators and viewers, by their keys."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import zmq

from actorserve.core.operations.verbs import OperatorRole
from actorserve.wire.console import Caller
from actorserve.wire.curve.handshakes import FAILED, HandshakeMonitor
from actorserve.wire.curve.sockets import serve_with_curve
from actorserve.wire.curve.zap import ZapHandler
from actorserve.wire.refusals import Refusals
from actorserve.wire.trust import WRONG_PERSON, HolderKind, Trust

_ROLES: Final = {HolderKind.OPERATOR: OperatorRole.OPERATOR, HolderKind.VIEWER: OperatorRole.VIEWER}


class KeyCallers:
    """Lets in the operators and viewers that ``trust`` knows, and judges each command by its key (``console.Callers``).

    ``counts`` has the refusals by reason. ``on_refusal`` gets a line for those that are logged.
    """

    def __init__(self, trust: Trust, on_refusal: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._trust = trust
        self._refusals = Refusals("console", self.counts, time.monotonic)
        self._refusals.on_line(on_refusal)
        self._guards: list[ZapHandler | HandshakeMonitor] = []

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        serve_with_curve(socket, self._trust.own)
        self._guards.append(ZapHandler(socket.context, self._trust, self._refusals))
        self._guards.append(HandshakeMonitor(socket, self._refuse_handshake))

    def identify(self, user_id: str) -> Caller | None:
        holder = self._trust.holder_of(user_id)
        role = None if holder is None else _ROLES.get(holder.kind)
        if role is None:
            self._refusals.refuse(WRONG_PERSON, user_id, f"a command of {holder or 'an unknown holder'}")
            return None
        return Caller(str(holder), role)

    def close(self) -> None:
        for guard in reversed(self._guards):
            guard.close()

    def _refuse_handshake(self, why: str) -> None:
        self._refusals.refuse(FAILED, "", f"a connection: {why}")
