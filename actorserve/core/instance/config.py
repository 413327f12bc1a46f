"""The sizes of an instance."""

import math
from dataclasses import dataclass, field

from actorserve.core.migration.source import MigrationConfig
from actorserve.core.scheduling.swapping import SwapMode


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """The sizes of an instance, from its engine and settings. ``headroom_bytes`` is by priority."""

    num_blocks: int
    tokens_per_block: int
    bytes_per_block: int
    max_context_tokens: int
    max_batch_requests: int
    max_batch_tokens: int
    load_report_s: float
    retry_s: float
    tpot_target_s: float = math.inf
    headroom_bytes: dict[int, int] = field(default_factory=dict)
    prefix_cache: bool = True
    num_host_blocks: int = 0
    swap_mode: SwapMode = SwapMode.PROACTIVE
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    checkpoint_tokens: int = 0  # new tokens of a request after which its KV is checkpointed; 0: never

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that can be served."""
        return min(self.max_context_tokens, self.num_blocks * self.tokens_per_block)
