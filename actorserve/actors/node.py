"""A node: the parts that connect one process to the cluster (transport, membership, clock, journal)."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from actorserve.actors.membership import MAX_PEERS, Membership, WatchTimes
from actorserve.actors.recorder import JournalRecorder, Recorder, open_journal
from actorserve.cluster.network import Network
from actorserve.core.messages import Hello, Peer, Role
from actorserve.core.recipes import Recipe
from actorserve.settings import ClusterSettings
from actorserve.wire.transport import Transport, TransportLimits
from actorserve.wire.trust import Trust
from actorserve.wire.zmq_transport import ZmqTransport

_FILES_PER_PEER: Final = 4  # one to send, one to receive, one for the socket; the rest is for other files
_LINKS_PER_PEER: Final = 2  # while a peer moves to another address


@dataclass(frozen=True, slots=True)
class Node:
    """What an actor needs to take part in the cluster. ``recorder``: None if no journal is written."""

    transport: Transport
    membership: Membership
    clock: Callable[[], float]
    recorder: Recorder | None = None


def open_node(
    name: str,
    hello: Hello,
    settings: ClusterSettings,
    network: Network,
    recipe: Recipe | None = None,
    trust: Trust | None = None,
) -> Node:
    """The node of this process, over ZeroMQ. Call it on the running event loop, once the process has loaded its data.

    ``hello`` describes the process to its peers. Its address and the cluster's id are filled in here, because a free
    port is known only when the socket has taken it. The journal begins with ``recipe``, from which the actor's core was
    made. With a ``trust``, what goes over tcp is encrypted and checked.

    Raises: TrustError when our key pair is not that of our host; ActorserveError when the address cannot be bound, or
    when the journal's folder belongs to another user; OSError when the journal cannot be written.
    """
    if trust is not None:
        trust.check_own(name)
    me = Peer(name, fresh_incarnation())
    max_links = min(_LINKS_PER_PEER * MAX_PEERS, raise_file_limit() // _FILES_PER_PEER)
    place = network.coordinator() if hello.role is Role.COORDINATOR else network.process(name)
    transport = ZmqTransport(me, place.bind, TransportLimits(max_links=max_links), trust)
    address = place.announced(transport.address)
    hello = replace(hello, address=address, cluster_id=network.cluster_id, takes_bundles=True)
    times = WatchTimes(settings.heartbeat_s, settings.death_after_s, settings.takeover_after_s)
    membership = Membership(transport, hello, network.coordinators, times)
    recorder = None
    if settings.journal_dir is not None:
        recorder = JournalRecorder(open_journal(settings.journal_dir, me), recipe)
    # The event loop's own clock is too coarse for a journal, because uvloop's counts whole milliseconds.
    return Node(transport, membership, time.monotonic, recorder)


def fresh_incarnation() -> int:
    """An incarnation for a process that starts now: microseconds of the wall clock.

    A process that rejoins adds one, so it stays below the incarnation of a later start. If the wall clock has gone
    back, peers that remember a later incarnation say so, and the process rejoins with a higher number.
    """
    return time.time_ns() // 1000


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, because every peer takes several. Returns that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
