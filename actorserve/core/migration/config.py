"""How an instance moves its requests to others."""

from dataclasses import dataclass, field
from enum import StrEnum


class MigrationMode(StrEnum):
    """How a request moves."""

    LIVE = "live"
    BLOCKING = "blocking"  # it pauses while all of its KV is copied
    RECOMPUTE = "recompute"  # its KV is dropped, and computed again


class LayerCopies(StrEnum):
    """When KV that an iteration still writes is copied layer by layer."""

    PROFITABLE = "profitable"  # where this is expected to end sooner
    ALWAYS = "always"
    NEVER = "never"  # but in one piece, once all of it is written
    AFTER = "after"  # in one piece, once the iteration has ended


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """``ticket_key``, in hex, is this instance's secret (``core.kv.tickets``). At most ``max_outgoing`` requests leave
    at once. ``timeout_s`` bounds how long the other side may take for a step, in addition to the time that copying
    takes. Copies of requests that go on decoding are paced to ``bytes_per_s``; None sets no pace. The model has
    ``num_layers`` layers, and ``layer_copies`` says when a handoff copies these one by one.
    """

    mode: MigrationMode = MigrationMode.LIVE
    ticket_key: str = field(default="", repr=False)
    max_outgoing: int = 4
    timeout_s: float = 2.0
    bytes_per_s: float | None = None
    num_layers: int = 1
    layer_copies: LayerCopies = LayerCopies.PROFITABLE
