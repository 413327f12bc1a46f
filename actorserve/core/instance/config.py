"""The configuration of an instance's core."""

from dataclasses import dataclass, field

from actorserve.core.defaults import RETRY_S
from actorserve.core.kv.layer_groups import ONE_GROUP, LayerGroups
from actorserve.core.messages import InstanceRole
from actorserve.core.migration.config import MigrationConfig
from actorserve.core.scheduling.mlfq import PROMOTE_AFTER_S
from actorserve.core.scheduling.swapping import SwapMode
from actorserve.core.scheduling.token_budget import MAX_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """The sizes of the engine's KV pools, and how the instance schedules.

    ``bytes_per_block`` is of one layer group. An iteration holds at most ``max_batch_requests`` requests and
    ``max_batch_tokens`` tokens, and on a prompt instance at most ``max_prompt_tokens`` tokens of prefills. Prefills are
    fed in chunks so short that an iteration with decodes takes no longer than ``tpot_target_s`` (infinite: no target).
    With ``whole_prompts`` no prefill is cut, there is no target (``core.scheduling.whole_prompts``), and prompts keep a
    decode out of the batch for ``max_decode_wait_s`` at most. With ``run_ahead`` an iteration is planned while the one
    before it runs.
    ``headroom_bytes``, by priority, is KV memory that counts as used in addition to what running requests of that
    priority hold. After each ``checkpoint_tokens`` new tokens of a request another worker copies its KV; 0 switches
    checkpoints off. Loads are reported every ``load_report_s``, and with ``report_changes`` also when a prompt was
    computed or a request has ended, for baselines whose dispatcher knows the queues as they are. ``role`` is the one
    that it begins with.
    """

    num_blocks: int
    tokens_per_block: int
    bytes_per_block: int
    max_context_tokens: int
    layer_groups: LayerGroups = ONE_GROUP
    max_batch_requests: int = 64
    max_batch_tokens: int = 512
    load_report_s: float = 0.2
    report_changes: bool = False
    retry_s: float = RETRY_S
    tpot_target_s: float = 0.1
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    whole_prompts: bool = False
    max_decode_wait_s: float = PROMOTE_AFTER_S
    run_ahead: bool = True
    headroom_bytes: dict[int, int] = field(default_factory=dict)
    prefix_cache: bool = True
    num_host_blocks: int = 0
    swap_mode: SwapMode = SwapMode.PROACTIVE
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    checkpoint_tokens: int = 0
    role: InstanceRole = InstanceRole.MIXED

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of one request that an iteration feeds."""
        return self.max_context_tokens if self.whole_prompts else self.max_batch_tokens

    @property
    def max_tokens(self) -> int:
        """Prompt and output of the largest request that can be served."""
        shape = self.layer_groups.row_shape(self.tokens_per_block, self.max_chunk_tokens)
        return min(self.max_context_tokens, shape.max_rows(self.num_blocks) * self.tokens_per_block)
