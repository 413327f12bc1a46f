"""The prefix cache: a request skips the tokens whose KV already lies in the pool, whichever request computed it.

The KV of a token depends on that token and all tokens before it. So a full block is named by a hash of its tokens and
of the previous block's name: equal names, equal KV. The first block's hash starts from the tenant's ``cache_salt``:
tenants with different salts share nothing, and cannot learn from an answer's speed what other tenants asked. Names have
256 bits because clients choose tokens, and must not be able to find two prompts with the same name.
"""

from array import array
from hashlib import blake2b

from actorserve.core.kv.block_allocator import BlockAllocator, blocks_for
from actorserve.core.kv.kv_holding import KVHolding

_NAME_BYTES = 32
_TOKEN_BYTES = 8


class PrefixCache:
    """Connects requests with the allocator's shared blocks. Without ``enabled`` it finds nothing and shares nothing."""

    def __init__(self, allocator: BlockAllocator, tokens_per_block: int, enabled: bool) -> None:
        self._allocator = allocator
        self._tokens_per_block = tokens_per_block
        self._enabled = enabled
        self.num_tokens_looked_up = 0
        self.num_tokens_found = 0

    def num_blocks_wanted(self, holding: KVHolding) -> int:
        """Free blocks that a waiting request takes when it starts, including cached blocks with its tokens."""
        num_blocks = blocks_for(holding.num_tokens, self._tokens_per_block)
        return num_blocks - self._allocator.find(self._names(holding)).num_owned

    def find(self, holding: KVHolding) -> list[bytes]:
        """The names of the first blocks that lie in the pool. Takes none of them."""
        names = self._names(holding)
        return names[: self._allocator.find(names).num_blocks]

    def num_cached_tokens(self, holding: KVHolding) -> int:
        """How many tokens need not be computed if the request starts now."""
        return len(self.find(holding)) * self._tokens_per_block

    def start(self, holding: KVHolding) -> None:
        """Give a waiting request blocks for all of its tokens, which must be free. Found blocks count as computed."""
        found = self.find(holding)
        blocks = self._allocator.allocate(blocks_for(holding.num_tokens, self._tokens_per_block), found)
        assert blocks is not None
        holding.blocks = blocks
        holding.num_computed = len(found) * self._tokens_per_block
        if self._enabled and holding.num_cached_tokens is None:
            holding.num_cached_tokens = holding.num_computed
            self.num_tokens_looked_up += len(holding.token_ids)
            self.num_tokens_found += holding.num_computed

    def share_computed(self, holding: KVHolding, num_fed: int) -> list[int]:
        """Let others find the blocks that the ``num_fed`` newest computed tokens have filled.

        Returns the blocks whose content lay in the pool already. The holding has the older blocks now, and these are
        to be freed.
        """
        num_full, num_over = divmod(holding.num_computed, self._tokens_per_block)
        if num_over >= num_fed or not self._enabled:
            return []  # no block was filled, as in most decode steps
        names = block_names(holding, num_full, self._tokens_per_block)
        replaced = []
        for index in range((holding.num_computed - num_fed) // self._tokens_per_block, num_full):
            block = holding.blocks[index]
            holding.blocks[index] = shared = self._allocator.share(block, names[index])
            if shared != block:
                replaced.append(block)
        return replaced

    def _names(self, holding: KVHolding) -> list[bytes]:
        """Names of the blocks that may be found. Not the last token's, because it must be fed to get the next token."""
        if not self._enabled or not holding.may_reuse_kv:
            return []
        return block_names(holding, (len(holding.token_ids) - 1) // self._tokens_per_block, self._tokens_per_block)


def block_names(holding: KVHolding, num_blocks: int, tokens_per_block: int) -> list[bytes]:
    """The names of its first ``num_blocks`` blocks, all of them full.

    The names are kept in the holding, so that each block is hashed once.
    """
    names = holding.block_names
    first = len(names)
    tokens = array("q", holding.token_ids[first * tokens_per_block : num_blocks * tokens_per_block]).tobytes()
    block_bytes = tokens_per_block * _TOKEN_BYTES
    name = names[-1] if names else _root(holding.cache_salt)
    for start in range(0, len(tokens), block_bytes):
        name = blake2b(name + tokens[start : start + block_bytes], digest_size=_NAME_BYTES).digest()
        names.append(name)
    return names[:num_blocks]


def _root(cache_salt: str) -> bytes:
    # Hashed in a domain of its own, so that no tenant can choose a salt that equals the name of another's block.
    return blake2b(cache_salt.encode(), digest_size=_NAME_BYTES, person=b"cache_salt").digest()
