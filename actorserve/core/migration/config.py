"""How an instance moves its requests to others."""

from dataclasses import dataclass, field
from enum import StrEnum


class MigrationMode(StrEnum):
    """How a request moves."""

    LIVE = "live"
    BLOCKING = "blocking"  # it stands still while all of its KV is copied
    RECOMPUTE = "recompute"  # its KV is dropped, and computed again


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """``ticket_key``, in hex, is this instance's secret (``core.kv.tickets``). ``max_outgoing`` requests are on their
    way out at once; ``timeout_s`` is how long at least the other side may take for a step. ``bytes_per_s`` is what it
    reads at the most; None where nothing bounds that.
    """

    mode: MigrationMode = MigrationMode.LIVE
    ticket_key: str = field(default="", repr=False)
    max_outgoing: int = 4
    timeout_s: float = 2.0
    bytes_per_s: float | None = None
