"""What the parts of an instance that copy KV between workers have in common."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol

from actorserve.core.messages import Energy, KVAccess, Message, Peer, Transfer, TransferKind
from actorserve.core.request import Request

Handler = Callable[[Any, Peer, float], bool | None]
"""Takes a message, its sender and the time in seconds. False: the message was not expected."""


class Participant:
    """One side of all transfers of one kind. The instance tells it of each event; by default it ignores the event."""

    kind: ClassVar[TransferKind]

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """By message type: messages that no other participant handles."""
        return {}

    @property
    def transfer_handlers(self) -> Mapping[type[Message], Handler]:
        """By message type: messages about one transfer, of which the participant gets those of its kind."""
        return {}

    @property
    def wants_step_end(self) -> bool:
        """Whether it has something to decide when the step in flight ends, whatever that step brings."""
        return False

    def on_peer_up(self, peer: Peer, access: KVAccess | None) -> None:
        """Another worker is up. ``access`` tells how to read its KV; None if that is not possible."""

    def on_peer_down(self, peer: Peer, now: float) -> None:
        """Another process is dead, a worker or a gateway."""

    def on_gone(self, request: Request) -> None:
        """The instance has forgotten a request: it finished, left, or has a new epoch elsewhere."""

    def on_drain(self) -> None:
        """The instance takes nothing new from now on."""

    def on_tick(self, now: float) -> None:
        """A deadline of the instance has come, maybe this participant's."""

    def settle(self, now: float) -> None:
        """After each event, before the next iteration is planned."""

    def next_deadline(self) -> float | None:
        """When it needs a Tick, in seconds on the shell's clock."""
        return None

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""


class Receiver(Protocol):
    """The side that copies KV here, and gives it to the request once a gateway starts the request here."""

    kind: ClassVar[TransferKind]

    def on_fetched(self, transfer: Transfer, now: float, *, failed: bool) -> None:
        """The copy in flight for this transfer succeeded or failed."""
        ...

    def adopt(self, transfer: Transfer, request: Request) -> bool:
        """Give ``request``, which is this instance's from now on, the KV that was copied. False if none is usable."""
        ...


class Running(Protocol):
    """What participants ask of the instance's iterations."""

    @property
    def running(self) -> Collection[Request]:
        """The requests in the iterations in flight, each once."""
        ...

    def is_running(self, request: Request) -> bool:
        """Whether an iteration in flight names the request."""
        ...

    def left_s(self, request: Request, now: float) -> float:
        """How long the iterations in flight that name the request are expected to go on; 0 if there are none."""
        ...

    def energy_of(self, request: Request) -> Energy | None:
        """What was spent on the request here; None if that is not known."""
        ...
