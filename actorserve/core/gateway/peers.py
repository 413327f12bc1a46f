"""The other processes, as a gateway knows them."""

from dataclasses import dataclass, field

from actorserve.core.messages import LoadReport, Peer, WorkerInfo


@dataclass(slots=True)
class KnownPeers:
    """The coordinator and the workers that are up, and the last load report of each worker."""

    coordinator: Peer | None = None
    workers: dict[Peer, WorkerInfo] = field(default_factory=dict)
    loads: dict[Peer, LoadReport] = field(default_factory=dict)

    def accepts_requests(self, worker: Peer) -> bool:
        """Whether the worker is up and, as far as its last report says, not draining."""
        load = self.loads.get(worker)
        return worker in self.workers and (load is None or not load.draining)
