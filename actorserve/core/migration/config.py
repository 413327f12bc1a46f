"""How an instance moves its requests to others."""

from dataclasses import dataclass, field
from enum import StrEnum


class MigrationMode(StrEnum):
    """How a request moves."""

    LIVE = "live"
    BLOCKING = "blocking"  # it pauses while all of its KV is copied
    RECOMPUTE = "recompute"  # its KV is dropped, and computed again


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """``ticket_key``, in hex, is this instance's secret (``core.kv.tickets``). At most ``max_outgoing`` requests leave
    at once. ``timeout_s`` bounds how long the other side may take for a step, in addition to the time that copying
    takes. Copies of requests that go on decoding are paced to ``bytes_per_s``; None sets no pace.
    """

    mode: MigrationMode = MigrationMode.LIVE
    ticket_key: str = field(default="", repr=False)
    max_outgoing: int = 4
    timeout_s: float = 2.0
    bytes_per_s: float | None = None
