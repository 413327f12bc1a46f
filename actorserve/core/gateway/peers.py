"""The other processes, as a gateway knows them."""

from dataclasses import dataclass, field

from actorserve.core.messages import Cordon, LoadDigest, LoadReport, Peer, WorkerInfo


@dataclass(slots=True)
class KnownPeers:
    """The coordinator and the workers that are up, and the last load report of each worker.

    The gateways of the host ``shown_on`` show the reports in their metrics. The last report came at ``loads_at_s``.
    """

    coordinator: Peer | None = None
    term: int = 0  # the newest one in which a coordinator has served
    workers: dict[Peer, WorkerInfo] = field(default_factory=dict)
    loads: dict[Peer, LoadReport] = field(default_factory=dict)
    shown_on: str = ""
    loads_at_s: float = 0.0

    def take(self, digest: LoadDigest, now: float) -> None:
        """The coordinator's reports take the place of all others, except of newer ones that came from workers."""
        loads = {}
        for worker, report in zip(digest.workers, digest.reports, strict=True):
            known = self.loads.get(worker)
            if worker in self.workers:
                loads[worker] = report if known is None or known.sequence < report.sequence else known
        self.loads = loads
        self.shown_on = digest.shown_on
        self.loads_at_s = now

    def accepts_requests(self, worker: Peer) -> bool:
        """Whether the worker is up and, as far as its last report says, neither draining nor cordoned."""
        load = self.loads.get(worker)
        return worker in self.workers and (load is None or (not load.draining and load.cordon is Cordon.OPEN))
