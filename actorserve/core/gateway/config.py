"""The configuration of a gateway's core."""

from dataclasses import dataclass, field
from math import inf

from actorserve.core.defaults import MAX_QUEUE_PER_INSTANCE, RETRY_S, placement_ttl_s
from actorserve.core.pools.config import PoolsConfig


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """A new request is refused after ``no_instance_timeout_s`` without an instance. A request whose client has part of
    the answer ends after ``resume_timeout_s``. ``max_queue_per_instance``, ``report_ttl_s`` and ``pools`` apply while
    the coordinator is gone: then a worker that has not reported for ``report_ttl_s`` gets no requests until it does.
    ``prefix_aware`` must be off if instances have no prefix cache, because naming a prompt's prefixes takes time.
    """

    retry_s: float = RETRY_S
    no_instance_timeout_s: float = 30.0
    resume_timeout_s: float = 600.0
    max_queue_per_instance: int = MAX_QUEUE_PER_INSTANCE
    prefix_aware: bool = True
    report_ttl_s: float = inf
    pools: PoolsConfig = field(default_factory=PoolsConfig)

    @property
    def placement_ttl_s(self) -> float:
        """How long a placement counts if no load report confirms it."""
        return placement_ttl_s(self.retry_s)

    @property
    def retry_slack_s(self) -> float:
        """A tick also sends retries due within this time, so that thousands of waiting requests cost few ticks."""
        return self.retry_s / 8
