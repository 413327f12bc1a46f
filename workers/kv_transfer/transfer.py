"""Reads other workers' KV and serves this worker's own. It chooses the way for each pair of workers."""

import logging
import threading
from typing import TYPE_CHECKING

import zmq

from actorserve.core.effects import Fetch
from actorserve.core.messages import KVAccess, Peer
from actorserve.errors import ActorserveError
from actorserve.wire.curve.addresses import is_reachable_from_elsewhere
from actorserve.wire.trust import Trust
from workers.kv.pools import BlockMemory, HostBlocks, KVPools
from workers.kv_transfer.cancellation import Cancellation
from workers.kv_transfer.curve.client import CurveClient
from workers.kv_transfer.curve.server import CurveServer
from workers.kv_transfer.data_client import DataClient
from workers.kv_transfer.data_server import DataServer
from workers.kv_transfer.errors import DirectCopyError, TransferError
from workers.kv_transfer.links import Follower, Link, this_host
from workers.kv_transfer.mapped import MappedPool
from workers.kv_transfer.pacing import UNBOUNDED, Rate, TokenBucket

if TYPE_CHECKING:
    from workers.kv_transfer.cuda import CudaBlocks

_log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long to wait for a source that sends nothing
_CLOSED = "this worker is shutting down"
_LinkKey = tuple[Peer, bool, bool, bool]
"""Source; whether to read its host pool; whether to write our host pool; whether for urgent fetches."""


class _Held:
    """A link, opened when it is first needed, and the lock of the thread that uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link: Link | None = None

    def close(self) -> None:
        """The caller holds the lock."""
        if self.link is not None:
            self.link.close()
            self.link = None


class KVTransfer:
    """Reads other workers' blocks into ``pools``, and serves its own blocks at ``bind`` to readers with a ticket made
    with ``ticket_key``.

    ``bind``: ``ipc://path``, a Unix socket, or ``tcp://host:port``; a port may be ``*``. Other workers reach a TCP bind
    by ``announced_host``, which is required if the bind names no host. ``rate`` limits how fast each source is read,
    except by urgent fetches. With a ``trust``, what goes over TCP is encrypted, and only hosts with workers may read;
    without one, TCP is for loopback alone.

    Raises: ActorserveError if ``bind`` cannot be bound or reached, or needs keys.
    """

    def __init__(
        self,
        pools: KVPools,
        bind: str,
        ticket_key: bytes,
        *,
        announced_host: str = "",
        rate: Rate = UNBOUNDED,
        patience_s: float = PATIENCE_S,
        trust: Trust | None = None,
    ) -> None:
        if trust is None and is_reachable_from_elsewhere(bind):
            raise ActorserveError(f"cannot serve KV at {bind} without keys, because other machines could connect")
        self._pools = pools
        self._rate = rate
        self._patience_s = patience_s
        self._lock = threading.Lock()  # guards the following five fields
        self._closed = False
        self._reading: set[Cancellation] = set()
        self._held: dict[_LinkKey, _Held] = {}
        self._buckets: dict[Peer, TokenBucket] = {}
        self._unreachable: set[Peer] = set()  # sources whose GPU this GPU cannot read directly
        self._trust = trust
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # of our links to sources with keys
        self._server: DataServer | CurveServer
        if trust is not None and bind.startswith("tcp://"):
            self._server = CurveServer(pools, bind, ticket_key, trust, announced_host=announced_host)
        else:
            self._server = DataServer(pools, bind, ticket_key, announced_host=announced_host)
        gpu = _on_gpu(pools.device)
        self.access = KVAccess(
            layout=pools.layout,
            address=self._server.address,
            num_blocks=pools.device.num_blocks,
            num_host_blocks=pools.host.num_blocks,
            host=this_host(),
            shared="" if pools.device_memory is None else pools.device_memory.shown,
            shared_host="" if pools.host_memory is None else pools.host_memory.shown,
            cuda_ipc="" if gpu is None else gpu.export(),
            progress="" if pools.progress is None else pools.progress.shown,
        )
        """How other workers read our KV, for ``Hello``."""

    def fetch(self, fetch: Fetch, cancellation: Cancellation | None = None) -> None:
        """Copy the blocks of ``fetch``; return when they are complete. Urgent fetches may have a thread of their own. A
        fetch whose ticket names an iteration waits for that, so each of these must have one.

        Raises: TransferError, soon after the ``cancellation`` if there is one; after it nothing more is written.
        """
        cancellation = cancellation or Cancellation()
        with self._lock:
            if self._closed:
                cancellation.cancel(_CLOSED)
            self._reading.add(cancellation)
        try:
            self._fetch(fetch, cancellation)
        finally:
            with self._lock:
                self._reading.remove(cancellation)

    def _fetch(self, fetch: Fetch, cancellation: Cancellation) -> None:
        num_wanted = len(fetch.ticket.blocks) - fetch.num_skipped
        if fetch.access.layout != self._pools.layout:
            raise TransferError(f"the KV of {fetch.source.name} is laid out differently")
        if num_wanted != len(fetch.blocks) or fetch.num_skipped < 0:
            raise TransferError(f"a fetch of {num_wanted} blocks into {len(fetch.blocks)}")
        num_blocks = self._pools.pool(on_host=fetch.into_host).num_blocks
        if any(not 0 <= block < num_blocks for block in fetch.blocks):
            raise TransferError("a fetch into blocks beyond the pool")
        if not fetch.blocks:
            return
        if fetch.into_host:
            self._pools.host_written.update(fetch.blocks)
        key = (fetch.source, fetch.ticket.on_host, fetch.into_host, fetch.is_urgent)
        with self._lock:
            # Others must not wait for a link that waits for an iteration, so such a fetch has a link of its own.
            held = _Held() if fetch.ticket.step_id else self._held.setdefault(key, _Held())
            bucket = self._buckets.setdefault(fetch.source, TokenBucket(self._rate))
            earlier = [old for old in self._held if old[0].name == key[0].name and old[0] != key[0]]
            self._drop(earlier)
            self._unreachable -= {peer for peer in self._unreachable if peer.name == key[0].name and peer != key[0]}
        with held.lock:
            try:
                try:
                    self._read(held, fetch, bucket, cancellation)
                except DirectCopyError as error:
                    held.close()
                    self._remember_unreachable(fetch.source, error)
                    self._read(held, fetch, bucket, cancellation)
            except TransferError:
                held.close()  # the next fetch opens a new link
                raise
            finally:
                with self._lock:
                    is_forgotten = self._held.get(key) is not held
                if is_forgotten:
                    held.close()

    def forget(self, source: Peer) -> None:
        """Release the links to a worker that is down, because its memory stays until nothing maps it. Never waits."""
        with self._lock:
            self._buckets.pop(source, None)
            self._unreachable.discard(source)
            self._drop([key for key in self._held if key[0] == source])

    def close(self) -> None:
        """Stop serving and fetching. A fetch in flight fails soon."""
        with self._lock:
            self._closed = True
            for cancellation in self._reading:
                cancellation.cancel(_CLOSED)
            self._drop(list(self._held))
        self._server.close()
        if self._context is not None:
            self._context.term()  # once the fetches in flight, which are cancelled, have closed their links

    def _read(self, held: _Held, fetch: Fetch, bucket: TokenBucket, cancellation: Cancellation) -> None:
        """Read by the held link, opened now if need be. The caller holds ``held.lock``. Raises: TransferError."""

        def pace(num_bytes: int) -> None:
            bucket.take(num_bytes, is_urgent=fetch.is_urgent)
            cancellation.check()

        cancellation.check()
        if held.link is None:
            held.link = self._open(fetch)
        held.link.read(fetch.ticket, fetch.num_skipped, fetch.blocks, pace, cancellation, into_host=fetch.into_host)

    def _remember_unreachable(self, source: Peer, error: DirectCopyError) -> None:
        """Read this source by its socket from now on. A later incarnation of the worker is tried anew."""
        with self._lock:
            is_known = source in self._unreachable
            self._unreachable.add(source)
        if not is_known:
            _log.warning("KV of %s comes by a socket, not from GPU to GPU, which takes longer: %s", source.name, error)

    def _drop(self, keys: list[_LinkKey]) -> None:
        """Forget these links. A link in use is closed by the thread that uses it. The caller holds ``self._lock``."""
        for key in keys:
            held = self._held.pop(key)
            if held.lock.acquire(blocking=False):
                held.close()
                held.lock.release()

    def _open(self, fetch: Fetch) -> Link:
        access, on_host = fetch.access, fetch.ticket.on_host
        pools, gpu = self._pools, _on_gpu(self._pools.device)
        same_host = access.host == self.access.host
        shown, num_blocks = (
            (access.shared_host, access.num_host_blocks) if on_host else (access.shared, access.num_blocks)
        )
        if same_host and shown:
            return MappedPool(shown, num_blocks, pools, Follower(access.progress), on_host=on_host)
        on_gpus = access.cuda_ipc and not on_host and not fetch.into_host
        if same_host and on_gpus and gpu is not None and fetch.source not in self._unreachable:
            from workers.kv_transfer.cuda_ipc import CudaPool

            return CudaPool(access.cuda_ipc, num_blocks, pools, gpu, Follower(access.progress))
        if access.address.startswith("tcp://") and self._trust is not None:
            with self._lock:
                context = self._context = self._context or zmq.Context()
            return CurveClient(context, fetch.source.name, access.address, pools, self._patience_s, self._trust)
        if is_reachable_from_elsewhere(access.address):
            raise TransferError(f"KV cannot be read from {access.address[:80]!r} without keys")
        return DataClient(access.address, pools, self._patience_s, with_checksum=not same_host)


def _on_gpu(memory: BlockMemory) -> "CudaBlocks | None":
    """The memory if a GPU holds it. Its module loads torch, which an engine on the host may do without."""
    if isinstance(memory, HostBlocks):
        return None
    from workers.kv_transfer.cuda import CudaBlocks

    return memory if isinstance(memory, CudaBlocks) else None
