"""The configuration of Splitwise's pools."""

from dataclasses import dataclass
from math import inf
from typing import Final

MAX_PENDING_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True)
class PoolsConfig:
    """If every queue of the prompt pool has more than ``max_pending_tokens`` with the new prompt, the mixed pool is
    tried. An instance that was drafted into it stays for ``hold_s`` after its last foreign request.

    ``across_kinds``: a request's tokens may be computed by another kind of worker than its prompt. The answer's tokens
    then differ from those of one kind alone. The operator says so, because both kinds must store KV alike.

    ``follow_load``: instances change between the prompt and the token pool as the load needs (``core.pools.sizing``).
    ``tpot_target_s`` is what the time of their iterations is held to there.
    """

    max_pending_tokens: int = MAX_PENDING_TOKENS
    hold_s: float = 10.0
    across_kinds: bool = False
    follow_load: bool = False
    tpot_target_s: float = inf
