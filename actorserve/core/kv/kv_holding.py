"""KV of one sequence of tokens: how far it is computed, and which blocks hold it."""

from array import array
from collections.abc import Iterable


class KVHolding:
    """What the KV memory knows of a request, of an incoming migration, or of a checkpoint.

    KV exists for the first ``num_computed`` of ``token_ids``, which take four bytes each. It lies in ``blocks`` of the
    device's pool or in ``host_blocks`` of the host's pool, and in both while the swap ``copy_id`` is in flight
    (``core.kv.kv_memory``). ``copy_id`` may also be a copy from another instance (``core.kv.kv_pools``).

    Iterations in flight, of which ``last_step`` is the newest that names this, compute KV of ``num_ahead`` more tokens,
    and make ``num_coming`` tokens that are not known yet. Planning counts on both; everything else counts only what is
    there.

    ``blocks`` and ``host_blocks`` go row by row (``core.kv.layer_groups``). If the model has layers with a window,
    their groups have device blocks in the rows from ``first_row`` to ``end_row``, and host blocks in all rows from
    ``first_row`` on.

    ``block_names`` names its first full rows (``core.kv.prefix_cache``), as far as names have been needed.
    ``num_cached_tokens`` is how many tokens the prefix cache had computed when this was first admitted; None before.
    """

    __slots__ = (
        "block_names",
        "blocks",
        "cache_salt",
        "copy_id",
        "end_row",
        "first_row",
        "host_blocks",
        "last_step",
        "num_ahead",
        "num_cached_tokens",
        "num_coming",
        "num_computed",
        "token_ids",
    )

    def __init__(self, token_ids: Iterable[int] = (), cache_salt: str = "") -> None:
        self.token_ids = array("i", token_ids)
        self.cache_salt = cache_salt
        self.num_computed = 0
        self.num_ahead = 0
        self.num_coming = 0
        self.last_step = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.first_row = 0
        self.end_row = 0
        self.copy_id: int | None = None
        self.block_names: list[bytes] = []
        self.num_cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Its tokens, with those that iterations in flight make."""
        return len(self.token_ids) + self.num_coming

    @property
    def num_fed(self) -> int:
        """Tokens that have KV, or get it from iterations in flight."""
        return self.num_computed + self.num_ahead

    @property
    def num_uncomputed(self) -> int:
        """Tokens to feed, after the iterations in flight, before the next token can be sampled: 1 in decode, more in
        prefill, never 0.
        """
        return len(self.token_ids) + self.num_coming - self.num_computed - self.num_ahead

    @property
    def num_without_kv(self) -> int:
        """Known tokens that have no KV yet, even if iterations in flight compute it: 1 in decode, more in prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def may_reuse_kv(self) -> bool:
        """Whether it may take KV that exists, in cached blocks or in other workers' copies, instead of computing it."""
        return True

    @property
    def is_started(self) -> bool:
        """Whether it holds blocks. Otherwise it waits: it is new, or its KV was dropped."""
        return bool(self.blocks or self.host_blocks)

    @property
    def is_resident(self) -> bool:
        """Whether its KV lies on the device, so that it can run."""
        return bool(self.blocks) and self.copy_id is None

    @property
    def is_swapped(self) -> bool:
        """Whether its KV lies on the host alone."""
        return bool(self.host_blocks) and self.copy_id is None
