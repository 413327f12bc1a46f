"""The prefix cache: a request begins after the tokens whose KV lies in the pool already, whoever computed it.

KV of a token depends on that token and all before it. So what a full block holds is named by a hash of its tokens and
of the name of the block before it; equal names, equal KV. The first block's goes on from the tenant's ``cache_salt``:
tenants with different salts share nothing, and cannot learn from an answer's speed what others asked. Names have 256
bits, for tokens are chosen by clients, and nobody must find two prompts of one name.
"""

from array import array
from hashlib import blake2b

from actorserve.core.kv.block_allocator import BlockAllocator, blocks_for
from actorserve.core.request import Request

_NAME_BYTES = 32
_TOKEN_BYTES = 8


class PrefixCache:
    """Joins requests and the allocator's shared blocks. Not ``enabled`` it finds nothing and shares nothing."""

    def __init__(self, allocator: BlockAllocator, tokens_per_block: int, enabled: bool) -> None:
        self._allocator = allocator
        self._tokens_per_block = tokens_per_block
        self._enabled = enabled
        self.num_tokens_looked_up = 0
        self.num_tokens_found = 0

    def num_blocks_wanted(self, request: Request) -> int:
        """Free blocks that a waiting request takes when it starts, cached ones with its tokens among them."""
        num_blocks = blocks_for(len(request.token_ids), self._tokens_per_block)
        return num_blocks - self._allocator.find(self._names(request)).num_owned

    def find(self, request: Request) -> list[bytes]:
        """The names of the blocks, from the request's first on, that lie in the pool. Takes none of them."""
        names = self._names(request)
        return names[: self._allocator.find(names).num_blocks]

    def num_cached_tokens(self, request: Request) -> int:
        """How many of the request's tokens need not be computed if it starts now."""
        return len(self.find(request)) * self._tokens_per_block

    def start(self, request: Request) -> None:
        """Give a waiting request blocks for all of its tokens, which must be free; it goes on after those it found."""
        found = self.find(request)
        blocks = self._allocator.allocate(blocks_for(len(request.token_ids), self._tokens_per_block), found)
        assert blocks is not None
        request.blocks = blocks
        request.num_computed = len(found) * self._tokens_per_block
        if self._enabled and request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            self.num_tokens_looked_up += len(request.token_ids)
            self.num_tokens_found += request.num_computed

    def share_computed(self, request: Request, num_fed: int) -> None:
        """The blocks that the ``num_fed`` tokens just computed have filled may be found from now on."""
        num_full, num_over = divmod(request.num_computed, self._tokens_per_block)
        if num_over >= num_fed or not self._enabled:
            return  # none was filled, as in most decode steps
        names = block_names(request, num_full, self._tokens_per_block)
        for index in range((request.num_computed - num_fed) // self._tokens_per_block, num_full):
            request.blocks[index] = self._allocator.share(request.blocks[index], names[index])

    def _names(self, request: Request) -> list[bytes]:
        """Of the blocks that may be found: not the last token's, for to feed that is what gives the next one."""
        if not self._enabled:
            return []
        return block_names(request, (len(request.token_ids) - 1) // self._tokens_per_block, self._tokens_per_block)


def block_names(request: Request, num_blocks: int, tokens_per_block: int) -> list[bytes]:
    """The names of the request's first ``num_blocks`` blocks, all of them full.

    They are kept with the request, so that each block is hashed once.
    """
    names = request.block_names
    first = len(names)
    tokens = array("q", request.token_ids[first * tokens_per_block : num_blocks * tokens_per_block]).tobytes()
    block_bytes = tokens_per_block * _TOKEN_BYTES
    name = names[-1] if names else _root(request.spec.cache_salt)
    for start in range(0, len(tokens), block_bytes):
        name = blake2b(name + tokens[start : start + block_bytes], digest_size=_NAME_BYTES).digest()
        names.append(name)
    return names[:num_blocks]


def _root(cache_salt: str) -> bytes:
    # In a domain of its own, so that no salt can be made that stands for another tenant's tokens.
    return blake2b(cache_salt.encode(), digest_size=_NAME_BYTES, person=b"cache_salt").digest()
