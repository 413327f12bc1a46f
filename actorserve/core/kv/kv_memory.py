"""Where each request's KV lies: in the device's pool, in the host's, or on its way between them.

A request that has started holds device blocks, host blocks, or both while a copy is under way. What a copy reads is not
given up, and what it writes is not used, before the engine says that it is done; a request that leaves in the middle
leaves its blocks to the copy. So it is with copies from other instances, of requests that are to come from there.

FastServe (section 4.2) copies a request's whole KV. Here blocks that still lie in the device's pool under their
content's name (``core.kv.prefix_cache``) are not copied back: their bytes are there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from actorserve.core.effects import Effect, SwapIn, SwapOut
from actorserve.core.kv.block_allocator import BlockAllocator, blocks_for
from actorserve.core.kv.prefix_cache import PrefixCache
from actorserve.core.request import Request


@dataclass(slots=True)
class _Copy:
    """A copy between the pools, and the blocks that it holds. ``request`` is None once that has left."""

    effect: SwapOut | SwapIn
    request: Request | None
    num_freed: int = 0  # device blocks that are free once it is done


@dataclass(slots=True)
class _Fetching:
    """A copy from another instance, and the blocks that it writes. ``request`` is None once that has left."""

    blocks: tuple[int, ...]
    pool: BlockAllocator
    request: Request | None


class KVMemory:
    """The two pools of one instance."""

    def __init__(
        self, num_blocks: int, num_host_blocks: int, tokens_per_block: int, bytes_per_block: int, *, prefix_cache: bool
    ) -> None:
        self.device = BlockAllocator(num_blocks)
        self.host = BlockAllocator(num_host_blocks)
        self.prefixes = PrefixCache(self.device, tokens_per_block, prefix_cache)
        self.num_freeing_blocks = 0  # device blocks that are free once the copies under way are done
        self.num_checkpoint_blocks = 0  # host blocks that hold checkpoints of others' requests
        self.evict_checkpoints: Callable[[int], None] = lambda num_blocks: None  # that so many be free, if possible
        self.num_swap_outs = 0
        self.num_copied_blocks = 0
        self.tokens_per_block = tokens_per_block
        self._bytes_per_block = bytes_per_block
        self._copies: dict[int, _Copy] = {}
        self._fetches: dict[int, _Fetching] = {}
        self._num_copies = 0

    @property
    def is_copying(self) -> bool:
        """Whether copies between device and host are under way."""
        return bool(self._copies)

    @property
    def is_fetching(self) -> bool:
        """Whether copies from other instances are under way."""
        return bool(self._fetches)

    @property
    def held_blocks(self) -> int:
        """Blocks of KV that requests hold, on the device or on the host; not what is kept for other instances."""
        device, host = self.device, self.host
        num_held = device.num_usable_blocks - device.num_free_blocks + host.num_blocks - host.num_free_blocks
        return (
            num_held
            - self.num_checkpoint_blocks
            - sum(len(copy.effect.device_blocks) for copy in self._copies.values())
        )

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.tokens_per_block)

    def blocks_of(self, request: Request) -> int:
        """Blocks that all of a request's tokens take."""
        return blocks_for(len(request.token_ids), self.tokens_per_block)

    def bytes_of(self, request: Request) -> int:
        """KV of all of a request's tokens."""
        return self.blocks_of(request) * self._bytes_per_block

    def bytes_of_blocks(self, num_blocks: int) -> int:
        return num_blocks * self._bytes_per_block

    def blocks_wanted(self, request: Request) -> int:
        """Free device blocks that a request takes which holds none there."""
        return self.prefixes.num_blocks_wanted(request)

    def has_blocks(self, request: Request) -> bool:
        """Whether a request on the device has blocks for all of its tokens."""
        return len(request.token_ids) <= len(request.blocks) * self.tokens_per_block

    def start(self, request: Request) -> None:
        """Give a waiting request the blocks that it wants, which must be free."""
        self.prefixes.start(request)

    def grow(self, request: Request) -> bool:
        """Have a block for the request's newest token. False where none is free."""
        if len(request.token_ids) <= len(request.blocks) * self.tokens_per_block:
            return True
        blocks = self.device.allocate(1)
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def swap_bytes(self, request: Request) -> int:
        """What a swap out of this request copies."""
        return blocks_for(request.num_computed, self.tokens_per_block) * self._bytes_per_block

    def swap_out(self, request: Request, effects: list[Effect]) -> bool:
        """Begin to copy a request's KV to the host; its device blocks are free afterwards. False: no room there."""
        num_copied = blocks_for(request.num_computed, self.tokens_per_block)
        host_blocks = self.host.allocate(num_copied)
        if host_blocks is None and self.num_checkpoint_blocks:
            self.evict_checkpoints(num_copied)
            host_blocks = self.host.allocate(num_copied)
        if host_blocks is None:
            return False
        self.device.free(request.blocks[num_copied:])
        del request.blocks[num_copied:]
        request.host_blocks = host_blocks
        self.num_swap_outs += 1
        effect = SwapOut(self._next_copy_id(), tuple(request.blocks), tuple(host_blocks))
        self._begin(effect, request, effects, self.device.num_freed_by(request.blocks))
        return True

    def swap_in(self, request: Request, effects: list[Effect]) -> None:
        """Begin to copy a request's KV back, into device blocks for all of its tokens, which must be free."""
        found = self.prefixes.find(request)
        blocks = self.device.allocate(self.blocks_of(request), found)
        assert blocks is not None
        request.blocks = blocks
        request.num_computed = max(request.num_computed, len(found) * self.tokens_per_block)
        self.host.free(request.host_blocks[: len(found)])
        del request.host_blocks[: len(found)]
        if request.host_blocks:
            end = len(found) + len(request.host_blocks)
            effect = SwapIn(self._next_copy_id(), tuple(request.host_blocks), tuple(blocks[len(found) : end]))
            self._begin(effect, request, effects)

    def reserve(self, request: Request, num_spare: int) -> int | None:
        """Give a request that is to come here with its KV blocks for all of its tokens, and leave ``num_spare`` free.

        How many of them hold its KV already, found in the prefix cache; None, and nothing given, where too few are
        free.
        """
        if self.blocks_wanted(request) + num_spare > self.device.num_free_blocks:
            return None
        found = self.prefixes.find(request)
        blocks = self.device.allocate(self.blocks_of(request), found)
        if blocks is None:
            return None
        request.blocks = blocks
        return len(found)

    def extend(self, request: Request) -> bool:
        """Have blocks for all of the tokens of a request that has some. False, and nothing given, where none are."""
        blocks = self.device.allocate(self.blocks_of(request) - len(request.blocks))
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def guard(self, request: Request, num_blocks: int, num_spare: int) -> tuple[int, ...] | None:
        """Have so many host blocks more for checkpoints of another instance's request, and leave ``num_spare`` free.

        None, and nothing given, where too few are free.
        """
        blocks = None if num_blocks + num_spare > self.host.num_free_blocks else self.host.allocate(num_blocks)
        if blocks is None:
            return None
        request.host_blocks += blocks
        self.num_checkpoint_blocks += num_blocks
        return tuple(blocks)

    def release_checkpoint(self, request: Request, num_kept: int) -> None:
        """Give up all but the first ``num_kept`` of its host blocks; no copy writes any of them."""
        self.host.free(request.host_blocks[num_kept:])
        self.num_checkpoint_blocks -= len(request.host_blocks) - num_kept
        del request.host_blocks[num_kept:]

    def begin_fetch(self, request: Request, blocks: tuple[int, ...], *, into_host: bool = False) -> int:
        """A copy from another instance writes these blocks of the request until ``on_fetched``. The copy's id."""
        request.copy_id = copy_id = self._next_copy_id()
        self._fetches[copy_id] = _Fetching(blocks, self.host if into_host else self.device, request)
        return copy_id

    def is_fetch(self, copy_id: int) -> bool:
        return copy_id in self._fetches

    def on_fetched(self, copy_id: int) -> Request | None:
        """That copy is done, or failed: it writes nothing more. Whose it was; None where that has left.

        Raises: KeyError for one not under way.
        """
        fetch = self._fetches.pop(copy_id)
        if fetch.request is None:
            fetch.pool.free(fetch.blocks)
            if fetch.pool is self.host:
                self.num_checkpoint_blocks -= len(fetch.blocks)
        else:
            fetch.request.copy_id = None
        return fetch.request

    def drop(self, request: Request) -> None:
        """Take a request's KV from it: it waits again, with nothing computed.

        What a copy under way reads or writes is held until that is done.
        """
        blocks, host_blocks = request.blocks, request.host_blocks
        if request.copy_id is not None:
            copy = self._copies[request.copy_id]
            copy.request = None
            copied = set(copy.effect.device_blocks)
            blocks = [block for block in blocks if block not in copied]
            host_blocks = []
            request.copy_id = None
        self.device.free(blocks)
        self.host.free(host_blocks)
        request.blocks = []
        request.host_blocks = []
        request.num_computed = 0

    def let_go(self, request: Request) -> None:
        """Give up what was reserved or kept for another instance's request; what a copy writes once that is done."""
        written: set[int] = set()
        if request.copy_id is not None:
            fetch = self._fetches[request.copy_id]
            fetch.request = None
            written.update(fetch.blocks)
            request.copy_id = None
        # It holds blocks of one pool alone.
        self.device.free([block for block in request.blocks if block not in written])
        unwritten = [block for block in request.host_blocks if block not in written]
        self.host.free(unwritten)
        self.num_checkpoint_blocks -= len(unwritten)
        request.blocks = []
        request.host_blocks = []

    def on_copy_done(self, copy_id: int) -> int:
        """A copy is done: give up what it read. The bytes that it copied. Raises: KeyError for one not under way."""
        copy = self._copies.pop(copy_id)
        effect, request = copy.effect, copy.request
        self.num_freeing_blocks -= copy.num_freed
        is_out = isinstance(effect, SwapOut)
        if is_out or request is None:
            self.device.free(effect.device_blocks)
        if not is_out or request is None:
            self.host.free(effect.host_blocks)
        if request is not None:
            request.copy_id = None
            if is_out:
                request.blocks = []
            else:
                request.host_blocks = []
                self.prefixes.share_computed(request, request.num_computed)
        return len(effect.device_blocks) * self._bytes_per_block

    def _next_copy_id(self) -> int:
        self._num_copies += 1
        return self._num_copies

    def _begin(self, effect: SwapOut | SwapIn, request: Request, effects: list[Effect], num_freed: int = 0) -> None:
        request.copy_id = effect.copy_id
        self._copies[effect.copy_id] = _Copy(effect, request, num_freed)
        self.num_freeing_blocks += num_freed
        self.num_copied_blocks += len(effect.device_blocks)
        effects.append(effect)
