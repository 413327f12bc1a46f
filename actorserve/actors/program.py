"""A process of the cluster from its settings: transport, membership, core and, where asked for, a journal."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from actorserve.actors.death_watch import WatchTimes
from actorserve.actors.membership import COORDINATOR_NAME, MAX_PEERS, Membership
from actorserve.actors.node import Core, Node, fresh_incarnation
from actorserve.core.effects import Effect
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Peer, Role, WorkerInfo
from actorserve.core.replay import Recipe
from actorserve.errors import SettingsError
from actorserve.settings import ClusterSettings
from actorserve.wire.journal import write_effects, write_entry, write_recipe
from actorserve.wire.recipes import recipe_text
from actorserve.wire.transport import TransportLimits
from actorserve.wire.zmq_transport import ZmqTransport

_FILES_PER_PEER: Final = 4  # one for what goes there, one for what comes, one for the socket; and room for others
_LINKS_PER_PEER: Final = 2  # while it moves to another address


def address_of(name: str, runtime_dir: Path) -> str:
    """Where the process called ``name`` is reached on this host."""
    return f"ipc://{runtime_dir}/{name}.sock"


def make_node(
    name: str,
    role: Role,
    core: Core,
    perform: Callable[[Effect], None],
    settings: ClusterSettings,
    runtime_dir: Path,
    *,
    worker: WorkerInfo | None = None,
    recipe: Recipe | None = None,
    on_down: Callable[[Peer], None] | None = None,
) -> Node:
    """The node of this process. Call it on the running event loop, once what the process needs is loaded.

    ``recipe`` is what ``core`` was made from, for the journal. ``on_down`` is as a ``Node`` takes it.

    Raises: ActorserveError where its address cannot be bound, or the journal's folder is somebody else's; OSError
    where the journal cannot be written.
    """
    me = Peer(name, fresh_incarnation())
    max_links = min(_LINKS_PER_PEER * MAX_PEERS, raise_file_limit() // _FILES_PER_PEER)
    transport = ZmqTransport(me, address_of(name, runtime_dir), TransportLimits(max_links=max_links))
    membership = Membership(
        transport,
        Hello(PROTOCOL_VERSION, role, transport.address, worker),
        address_of(COORDINATOR_NAME, runtime_dir),
        WatchTimes(settings.heartbeat_s, settings.death_after_s),
    )
    record, record_effects = None, None
    if settings.journal_dir is not None:
        journal = open_journal(settings.journal_dir, me)
        if recipe is not None:
            write_recipe(journal, recipe_text(recipe))
        record, record_effects = partial(write_entry, journal), partial(write_effects, journal)
    clock = asyncio.get_running_loop().time
    return Node(transport, membership, core, perform, clock, record, record_effects, on_down)


def raise_file_limit() -> int:
    """Let this process open as many files as it ever may: each peer takes some. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_journal(folder: Path, me: Peer) -> BinaryIO:
    """A fresh journal of this incarnation, unbuffered: after a kill it holds all that the core was told.

    Only its owner may read it: it holds prompts, and the key of the worker's tickets.

    Raises: SettingsError, where the folder belongs to another user; OSError, where the file is there already, or cannot
    be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise SettingsError(f"the journal folder {folder} belongs to another user; choose another cluster.journal_dir")
    file = folder / f"{me.name}-{me.incarnation}.journal"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(file, flags, 0o600), "wb", buffering=0)


def on_termination(callback: Callable[[], None]) -> None:
    """Call ``callback`` on the loop when the process is asked to end (SIGTERM, or Ctrl-C without a supervisor)."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)
