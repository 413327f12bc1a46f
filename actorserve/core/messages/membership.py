"""Messages: finding and watching the cluster's processes."""

from actorserve.core.messages.value import value
from actorserve.core.messages.values import Peer, Role, WorkerInfo


@value
class Hello:
    """Any -> any, first on every link: the sender's role and address, and what it serves if it is a worker.

    ``answers`` is the incarnation of the receiver whose Hello this one answers; 0 asks for an answer. ``cluster_id``
    is empty in a cluster of one host. The digests of the model and of its tokenizer are empty if the sender has none.
    ``takes_bundles``: it reads frames of several messages.
    """

    protocol_version: int
    role: Role
    address: str = ""
    worker: WorkerInfo | None = None
    answers: int = 0
    cluster_id: str = ""
    model_digest: str = ""
    tokenizer_digest: str = ""
    takes_bundles: bool = False


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
class Serving:
    """c -> g, w: I serve in this term, and say so again within ``within_s`` seconds.

    ``answer``: the sender wants a Following, because it does not know that the receiver follows it.
    """

    term: int
    within_s: float
    answer: bool


@value
class Following:
    """g, w -> c: the newest term that the sender knows, the coordinator that serves in it (None before the first term),
    and whether the sender still hears that coordinator.
    """

    term: int
    coordinator: Peer | None
    hears: bool


@value
class Serve:
    """Local, to a coordinator called ``name``: serve the cluster, in this term."""

    term: int
    name: str


@value
class StandBy:
    """Local, to a coordinator: another one serves, so forget all that the cluster's processes have told.

    ``term`` is the newest known one, and ``serving`` its coordinator: 0 and empty if none is known.
    """

    term: int
    serving: str


@value
class PeerUp:
    """Local: the death watch met ``peer`` (a new incarnation first ends the old one, with a PeerDown).

    A coordinator is up from when it serves, in ``term``. A coordinator's peers are up from when they follow it.
    """

    peer: Peer
    role: Role
    worker: WorkerInfo | None = None
    term: int = 0


@value
class PeerDown:
    """Local: ``peer`` has been silent too long, said goodbye, or was replaced. This incarnation never comes back.

    Two exceptions: a coordinator that no longer serves is down as well, and comes up again in a later term. And a
    process that was fenced (``Fenced``) rejoins as a new incarnation of itself. Its own core sees
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
