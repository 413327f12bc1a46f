"""The base of the actors that form the cluster. It adds a node, which connects an actor to its peers.

Such an actor has two sources of messages: its own process (``tell``), and the bounded inbox of its transport.
Membership handles its own messages and turns them into PeerUp and PeerDown. The core gets all other messages.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from actorserve.actors.actor import Actor
from actorserve.actors.node import Node
from actorserve.actors.request_lines import log_message
from actorserve.core.effects import Effect, Meet, ReloadKeys, Send, SetLogLevel
from actorserve.core.messages import LOCAL, Message, Peer, PeerDown
from actorserve.core.operations.process_verbs import keys_answer
from actorserve.processes.reload import Reloaded
from actorserve.wire.journal import Entry

_BATCH: Final = 256
_log: Final = logging.getLogger("actorserve.actors")


class ClusterCore(Protocol):
    """The core of the coordinator, of a gateway, or of an instance. ``sender`` is None for a local message."""

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...


class ClusterActor(Actor[Message, Effect]):
    """A process of the cluster. It performs ``Send`` and ``Meet``; a concrete actor performs its core's other effects.

    The actor owns the node's transport, and closes it when ``run`` ends.
    """

    _core: ClusterCore

    def __init__(self, core: ClusterCore, node: Node) -> None:
        super().__init__(node.transport.me.name, core, node.clock)
        self.counts: Counter[str] = Counter()
        self.on_reload_keys: list[Callable[[], Reloaded]] = []
        """What reads the files of keys again, when an operator says so. None of them raises."""
        self._transport = node.transport
        self._membership = node.membership
        self._recorder = node.recorder

    @property
    def me(self) -> Peer:
        return self._transport.me

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are up, in the order of their names. The core has got a PeerUp for every one."""
        return self._membership.peers

    def num_dropped_frames(self) -> int:
        """How many frames the transport has dropped, because they were malformed or for another incarnation."""
        return sum(count for what, count in self._transport.counts.items() if what.startswith("dropped: "))

    def perform(self, effect: Effect) -> None:
        match effect:
            case SetLogLevel(level=level):
                logging.getLogger().setLevel(level.upper())
                _log.warning("logging at level %s, by an operator's order", level)
            case ReloadKeys(told=told, command_id=command_id):
                self._reload_keys(told, command_id)
            case _:
                super().perform(effect)

    def _reload_keys(self, told: Peer | None, command_id: str) -> None:
        reloaded = [reload() for reload in self.on_reload_keys]
        if told is None:
            return
        read = [name for one in reloaded for name in one.read]
        failed = [name for one in reloaded for name in one.failed]
        answer = keys_answer(command_id, read, failed)
        if told == LOCAL:
            self.tell(answer)
        else:
            self._send(Send(told, answer), self._clock())

    def peer_went_down(self, peer: Peer) -> None:
        """Called when ``peer`` went down, after the core's effects of the PeerDown were performed."""

    def start(self) -> None:
        """Begin to look for the peers. ``run`` calls this."""
        self._membership.start(self._clock())

    def stop(self) -> None:
        """Say goodbye to all peers and make ``run`` return. From now on no message is handled."""
        if not self._is_stopping:
            self._membership.leave()
        super().stop()

    def next_deadline(self) -> float | None:
        deadlines = (self._membership.next_deadline(), self._core.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def _open(self, wake: Callable[[], None]) -> None:
        self.start()
        self._transport.on_arrival(wake)

    def _close(self) -> None:
        self._transport.close()

    def _receive(self, now: float) -> bool:
        arrived = self._transport.take(_BATCH)
        for sender, message in arrived:
            changes = self._membership.handle(message, now, sender)
            if changes is None:
                self._handle(message, now, sender)
            else:
                for change in changes:
                    self._handle(change, now)
        return len(arrived) == _BATCH

    def _on_deadline(self, now: float, *, is_behind: bool) -> None:
        deadline = self._membership.next_deadline()
        if deadline is not None and now >= deadline:
            for change in self._membership.tick(now, is_behind=is_behind):
                self._handle(change, now)
        super()._on_deadline(now, is_behind=is_behind)

    def _handle(self, message: Message, now: float, sender: Peer | None = None) -> None:
        if self._is_stopping:
            return
        # The input is recorded before the core sees it, so that the journal of a crash ends with its cause.
        if self._recorder is not None:
            self._recorder.heard(Entry(now, sender, message))
        log_message("from", sender, message)
        effects = self._core.handle(message, now, sender)
        if self._recorder is not None:
            self._recorder.decided(effects)
        for effect in effects:
            if type(effect) is Send:
                self._send(effect, now)
            elif type(effect) is Meet:
                self._membership.get_to_know(effect.peer, now)
            else:
                self.perform(effect)
        if type(message) is PeerDown:
            self.peer_went_down(message.peer)

    def _send(self, effect: Send, now: float) -> None:
        log_message("to", effect.to, effect.message)
        if not self._membership.is_up(effect.to):
            self.counts["sends to a peer that is down"] += 1
        elif self._transport.send(effect.to, effect.message):
            self._membership.sent(effect.to, now)
        else:
            self.counts["sends refused by the transport"] += 1
