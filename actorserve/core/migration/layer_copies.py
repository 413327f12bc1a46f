"""How the KV that an iteration still writes is copied: in one piece once all of it is written, or layer by layer.

Splitwise (section 4.3) copies prompts of 512 tokens and more layer by layer while they are computed, so that only the
last layer's copy shows, and shorter ones in one piece, because many small copies cost more than they hide. Where that
pays depends on the link and on the model. So the number of tokens does not decide here, but which copy is expected to
delay the request less: the break-even of a copy's time (``StepTimes.transfer_s``) and the iteration's (``prefill_s``,
and what else the iteration computes).

A layer writes its KV first, before its attention and all that follows. So the last layer's KV is there a layer's time
before the iteration ends, and a copy in one piece that takes no longer than that delays nothing.
"""

from actorserve.core.migration.config import LayerCopies, MigrationConfig
from actorserve.core.timing.step_times import StepTimes


def is_by_layer(config: MigrationConfig, times: StepTimes, num_bytes: int, left_s: float) -> bool:
    """Whether ``num_bytes`` of KV are to be copied layer by layer, while the iteration that writes them goes on for
    ``left_s``.

    Each layer's copy has the latency of a copy, so that all together may take longer than the iteration. Where neither
    way delays the request, one piece is copied, because fewer copies disturb the iteration less.
    """
    num_layers = config.num_layers
    if num_layers == 1 or config.layer_copies is LayerCopies.NEVER:
        return False
    if config.layer_copies is LayerCopies.ALWAYS:
        return True
    written_s = left_s * (num_layers - 1) / num_layers
    layer_s = times.transfer_s(-(-num_bytes // num_layers))
    by_layer_s = max(left_s, written_s + layer_s, num_layers * layer_s)
    return by_layer_s < max(left_s, written_s + times.transfer_s(num_bytes))
