"""Messages: finding and watching the cluster's processes."""

from actorserve.core.messages.value import value
from actorserve.core.messages.values import Peer, Role, WorkerInfo


@value
class Hello:
    """Any -> any, first on every link: the sender's role and address, and what it serves if it is a worker.

    ``answers`` is the incarnation of the receiver whose Hello this one answers; 0 asks for an answer. ``cluster_id``
    is empty in a cluster of one host. The digests of the model and of its tokenizer are empty if the sender has none.
    """

    protocol_version: int
    role: Role
    address: str = ""
    worker: WorkerInfo | None = None
    answers: int = 0
    cluster_id: str = ""
    model_digest: str = ""
    tokenizer_digest: str = ""


@value
class Members:
    """c -> all: the processes now known, as parallel columns. A peer connects to the processes that it does not know
    yet.
    """

    names: tuple[str, ...]
    incarnations: tuple[int, ...]
    roles: tuple[Role, ...]
    addresses: tuple[str, ...]


@value
class Heartbeat:
    """Any -> any peer: I am alive. A peer that is silent for longer than the death watch's timeout counts as dead."""


@value
class PeerUp:
    """Local: the death watch met ``peer`` (a new incarnation first ends the old one, with a PeerDown)."""

    peer: Peer
    role: Role
    worker: WorkerInfo | None = None


@value
class PeerDown:
    """Local: ``peer`` has been silent too long, said goodbye, or was replaced. This incarnation never comes back.

    One exception: a process that was fenced (``Fenced``) rejoins as a new incarnation of itself. Its own core sees
    every peer go down first; then the same peers may come up again, with their old incarnations, because its own is
    new.
    """

    peer: Peer


@value
class Goodbye:
    """Any -> any: I am shutting down as planned; do not wait for my heartbeats."""


@value
class Fenced:
    """Any -> any: I consider your incarnation dead (it was silent too long, or is older than one that I know).

    Messages from it are ignored from now on. The process must rejoin as an incarnation above ``incarnation``.
    """

    incarnation: int
