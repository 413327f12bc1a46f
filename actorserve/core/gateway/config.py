"""A gateway's settings, as its core needs them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    retry_s: float
    no_instance_timeout_s: float
    resume_timeout_s: float
    max_queue_per_instance: int = 64  # as the coordinator's; for when it is gone

    @property
    def placement_ttl_s(self) -> float:
        return 5 * self.retry_s

    @property
    def retry_slack_s(self) -> float:
        """Retries that come due this soon go along, so that thousands that wait cost a few ticks and not thousands."""
        return self.retry_s / 8
