"""Where each request's KV lies: in the device's pool, in the host's pool, or in flight between them.

A started request holds device blocks, host blocks, or both while a swap is in flight. Until the engine reports the end
of a copy, the blocks that it reads are not freed and the blocks that it writes are not used. If a request leaves during
a copy, the copy keeps the request's blocks until its end.

Iterations in flight may name a request that is swapped out or dropped meanwhile. Its swap begins, or its blocks are
free, when the last of them has ended, because until then they write these blocks.

FastServe (section 4.2) copies the whole KV of a request in both directions. Here a swap in skips blocks that still lie
in the device's pool under their content's name (``core.kv.prefix_cache``).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from actorserve.core.effects import Effects, SwapIn, SwapOut
from actorserve.core.kv.block_allocator import blocks_for
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.kv.prefix_cache import PrefixCache


class ReclaimableBlocks(Protocol):
    """Host blocks with KV of other instances' requests. They may be freed, because swaps matter more."""

    @property
    def num_blocks(self) -> int:
        """How many such host blocks there are."""
        ...

    def make_room(self, num_blocks: int) -> None:
        """Free blocks until ``num_blocks`` of the host's pool are free, or none is left to free."""
        ...


@dataclass(slots=True)
class _Swap:
    """A copy between the pools, and the blocks that it holds. ``holding`` is None once the request has left."""

    effect: SwapOut | SwapIn
    holding: KVHolding | None
    num_freed: int = 0  # device blocks that are free once the copy is done


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Device blocks that a request gave up while an iteration used them."""

    last_step: int
    blocks: list[int]
    num_freed: int


class KVMemory:
    """The KV of one instance's requests."""

    def __init__(self, pools: KVPools, reclaimable: ReclaimableBlocks, effects: Effects, *, prefix_cache: bool) -> None:
        self.pools = pools
        self.device = pools.device
        self.host = pools.host
        self.tokens_per_block = pools.tokens_per_block
        self.prefixes = PrefixCache(pools.device, pools.tokens_per_block, prefix_cache)
        self.num_freeing_blocks = 0  # device blocks that are free once the swaps and steps in flight are done
        self.num_ended_steps = 0  # the newest step that has ended; steps end in the order of their numbers
        self.num_swap_outs = 0
        self.num_copied_blocks = 0
        self._reclaimable = reclaimable
        self._effects = effects
        self._bytes_per_block = pools.bytes_per_block
        self._swaps: dict[int, _Swap] = {}  # by copy id
        self._later_swaps: list[tuple[int, SwapOut | SwapIn]] = []  # each begins when this step has ended
        self._dropped: list[_Dropped] = []

    @property
    def is_copying(self) -> bool:
        """Whether swaps are in flight."""
        return bool(self._swaps)

    @property
    def waits_for_steps(self) -> bool:
        """Whether blocks of dropped requests are free only when iterations in flight have ended."""
        return bool(self._dropped)

    @property
    def is_fetching(self) -> bool:
        """Whether copies from other instances are in flight."""
        return self.pools.is_fetching

    @property
    def num_checkpoint_blocks(self) -> int:
        """Host blocks that hold KV of other instances' requests."""
        return self._reclaimable.num_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks of KV that this instance's requests hold, on the device or on the host."""
        device, host = self.device, self.host
        num_held = device.num_usable_blocks - device.num_free_blocks + host.num_blocks - host.num_free_blocks
        num_twice = sum(len(swap.effect.device_blocks) for swap in self._swaps.values())
        num_dropped = sum(dropped.num_freed for dropped in self._dropped)
        return num_held - self.num_checkpoint_blocks - num_twice - num_dropped

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of ``num_tokens`` tokens."""
        return blocks_for(num_tokens, self.tokens_per_block)

    def blocks_of(self, holding: KVHolding) -> int:
        """Blocks for the KV of all its tokens."""
        return blocks_for(holding.num_tokens, self.tokens_per_block)

    def bytes_of(self, holding: KVHolding) -> int:
        """Bytes of the KV of all its tokens."""
        return self.blocks_of(holding) * self._bytes_per_block

    def bytes_of_blocks(self, num_blocks: int) -> int:
        return num_blocks * self._bytes_per_block

    def blocks_wanted(self, holding: KVHolding) -> int:
        """How many free device blocks it would take, given that it holds none on the device."""
        return self.prefixes.num_blocks_wanted(holding)

    def has_blocks(self, holding: KVHolding) -> bool:
        """Whether it has device blocks for all of its tokens."""
        return holding.num_tokens <= len(holding.blocks) * self.tokens_per_block

    def start(self, holding: KVHolding) -> None:
        """Give a waiting request the blocks that it wants; they must be free."""
        self.prefixes.start(holding)

    def grow(self, holding: KVHolding) -> bool:
        """Ensure a device block for the newest token. False if none is free."""
        return self.has_blocks(holding) or self.add_block(holding)

    def add_block(self, holding: KVHolding) -> bool:
        """Give it one more device block. False if none is free."""
        blocks = self.device.allocate(1)
        if blocks is None:
            return False
        holding.blocks += blocks
        return True

    def reserve(self, holding: KVHolding, num_spare: int) -> int | None:
        """Give an incoming migration device blocks for all of its tokens, and leave ``num_spare`` blocks free.

        Returns how many of the blocks hold its KV already, found in the prefix cache. None, with nothing reserved, if
        too few are free.
        """
        if self.blocks_wanted(holding) + num_spare > self.device.num_free_blocks:
            return None
        found = self.prefixes.find(holding)
        blocks = self.device.allocate(self.blocks_of(holding), found)
        if blocks is None:
            return None
        holding.blocks = blocks
        return len(found)

    def extend(self, holding: KVHolding) -> bool:
        """Ensure device blocks for all of its tokens. False, with none allocated, if too few are free."""
        blocks = self.device.allocate(self.blocks_of(holding) - len(holding.blocks))
        if blocks is None:
            return False
        holding.blocks += blocks
        return True

    def drop(self, holding: KVHolding) -> None:
        """Free its KV: the request waits again, with nothing computed.

        Blocks that a swap reads or writes stay in use until the swap is done, and blocks that iterations in flight
        write until these have ended.
        """
        blocks, host_blocks = holding.blocks, holding.host_blocks
        if holding.copy_id is not None:
            swap = self._swaps[holding.copy_id]
            swap.holding = None
            copied = set(swap.effect.device_blocks)
            blocks = [block for block in blocks if block not in copied]
            host_blocks = []
            holding.copy_id = None
        self._free(blocks, holding)
        self.host.free(host_blocks)
        holding.blocks = []
        holding.host_blocks = []
        holding.num_computed = holding.num_ahead = 0

    def share_computed(self, holding: KVHolding, num_fed: int) -> None:
        """Let others find the blocks that the ``num_fed`` newest computed tokens have filled. Not while a swap reads
        them, because then their owner may not change.
        """
        if holding.copy_id is not None:
            return
        if replaced := self.prefixes.share_computed(holding, num_fed):
            self._free(replaced, holding)

    # --- iterations --------------------------------------------------------------------------------------------------

    def is_running(self, holding: KVHolding) -> bool:
        """Whether an iteration in flight names it."""
        return holding.last_step > self.num_ended_steps

    def on_step_ended(self, step_id: int) -> None:
        """An iteration has ended: begin the swaps, and free the blocks, that waited for it."""
        self.num_ended_steps = step_id
        if self._later_swaps:
            self._effects += (effect for last_step, effect in self._later_swaps if last_step <= step_id)
            self._later_swaps = [(last_step, effect) for last_step, effect in self._later_swaps if last_step > step_id]
        if self._dropped:
            for dropped in self._dropped:
                if dropped.last_step <= step_id:
                    self.device.free(dropped.blocks)
                    self.num_freeing_blocks -= dropped.num_freed
            self._dropped = [dropped for dropped in self._dropped if dropped.last_step > step_id]

    def _free(self, blocks: list[int], holding: KVHolding) -> None:
        """Free device blocks that were the holding's, once no iteration in flight uses them."""
        if blocks and self.is_running(holding):
            num_freed = self.device.num_freed_by(blocks)
            self._dropped.append(_Dropped(holding.last_step, blocks, num_freed))
            self.num_freeing_blocks += num_freed
        else:
            self.device.free(blocks)

    # --- swaps -------------------------------------------------------------------------------------------------------

    def swap_bytes(self, holding: KVHolding) -> int:
        """Bytes that a swap out copies."""
        return self.blocks_for(holding.num_fed) * self._bytes_per_block

    def swap_out(self, holding: KVHolding) -> bool:
        """Begin to copy its KV to the host; its device blocks are free afterwards. False if the host has no room."""
        num_copied = self.blocks_for(holding.num_fed)
        host_blocks = self.host.allocate(num_copied)
        if host_blocks is None:
            self._reclaimable.make_room(num_copied)
            host_blocks = self.host.allocate(num_copied)
        if host_blocks is None:
            return False
        self.device.free(holding.blocks[num_copied:])
        del holding.blocks[num_copied:]
        holding.host_blocks = host_blocks
        self.num_swap_outs += 1
        effect = SwapOut(self.pools.next_copy_id(), tuple(holding.blocks), tuple(host_blocks))
        self._begin(effect, holding, self.device.num_freed_by(holding.blocks))
        return True

    def swap_in(self, holding: KVHolding) -> None:
        """Begin to copy its KV back, into device blocks for all of its tokens; they must be free."""
        found = self.prefixes.find(holding)
        blocks = self.device.allocate(self.blocks_of(holding), found)
        assert blocks is not None
        holding.blocks = blocks
        holding.num_computed = max(holding.num_computed, len(found) * self.tokens_per_block)
        self.host.free(holding.host_blocks[: len(found)])
        del holding.host_blocks[: len(found)]
        if holding.host_blocks:
            end = len(found) + len(holding.host_blocks)
            effect = SwapIn(self.pools.next_copy_id(), tuple(holding.host_blocks), tuple(blocks[len(found) : end]))
            self._begin(effect, holding)

    def on_copy_done(self, copy_id: int) -> int:
        """A swap is done: free the blocks that it read. Returns the bytes that it copied.

        Raises: KeyError for a swap that is not in flight.
        """
        swap = self._swaps.pop(copy_id)
        effect, holding = swap.effect, swap.holding
        self.num_freeing_blocks -= swap.num_freed
        is_out = isinstance(effect, SwapOut)
        if is_out or holding is None:
            self.device.free(effect.device_blocks)
        if not is_out or holding is None:
            self.host.free(effect.host_blocks)
        if holding is not None:
            holding.copy_id = None
            if is_out:
                holding.blocks = []
            else:
                holding.host_blocks = []
                self.share_computed(holding, holding.num_computed)
        return len(effect.device_blocks) * self._bytes_per_block

    def _begin(self, effect: SwapOut | SwapIn, holding: KVHolding, num_freed: int = 0) -> None:
        holding.copy_id = effect.copy_id
        self._swaps[effect.copy_id] = _Swap(effect, holding, num_freed)
        self.num_freeing_blocks += num_freed
        self.num_copied_blocks += len(effect.device_blocks)
        if self.is_running(holding):
            self._later_swaps.append((holding.last_step, effect))
        else:
            self._effects.append(effect)

    # --- invariants --------------------------------------------------------------------------------------------------

    def validate(
        self, requests: Collection[KVHolding], incoming: Collection[KVHolding], checkpoints: Collection[KVHolding]
    ) -> None:
        """Raise AssertionError unless blocks are conserved and shared blocks hold the same content for every owner.

        ``incoming`` are incoming migrations, ``checkpoints`` those of other instances' requests.
        """
        holdings = [*requests, *incoming, *checkpoints]
        copying = {holding.copy_id for holding in holdings if holding.copy_id is not None}
        assert all(step_id > self.num_ended_steps for step_id, _ in self._later_swaps), (
            "a swap waits for a step that ended"
        )
        left = [swap.effect for swap in self._swaps.values() if swap.holding is None]
        for copy_id, swap in self._swaps.items():
            assert (swap.holding is None) != (copy_id in copying), f"swap {copy_id} has no owner, or one that left"
        assert all(copy_id in self._swaps or self.pools.is_fetch(copy_id) for copy_id in copying), "a copy is unknown"
        num_freeing = sum(swap.num_freed for swap in self._swaps.values())
        num_freeing += sum(dropped.num_freed for dropped in self._dropped)
        assert self.num_freeing_blocks == num_freeing, f"{self.num_freeing_blocks} blocks freeing, not {num_freeing}"
        num_held_for_others = (
            sum(len(holding.host_blocks) for holding in checkpoints) + self.pools.num_released_host_blocks
        )
        assert self.num_checkpoint_blocks == num_held_for_others, (
            f"{self.num_checkpoint_blocks} checkpoint blocks, not {num_held_for_others}"
        )
        self.pools.validate(
            [
                *(holding.blocks for holding in holdings),
                *(swap.device_blocks for swap in left),
                *(dropped.blocks for dropped in self._dropped),
            ],
            [*(holding.host_blocks for holding in holdings), *(swap.host_blocks for swap in left)],
            copying,
        )
        self._validate_contents(requests, incoming)

    def _validate_contents(self, requests: Collection[KVHolding], incoming: Collection[KVHolding]) -> None:
        size = self.tokens_per_block
        contents: dict[int, tuple[str, list[int]]] = {}  # of each full block: the salt and the tokens up to its end
        writers: set[int] = set()  # blocks whose owner still writes them
        for holding in requests:
            num_full = holding.num_computed // size
            assert len(set(holding.blocks)) == len(holding.blocks), "a request owns a block twice"
            for index, block in enumerate(holding.blocks):
                content = (holding.cache_salt, holding.token_ids[: (index + 1) * size])
                is_writer = index >= num_full
                assert block not in writers, f"block {block} has a second owner while the first still writes it"
                assert not (is_writer and block in contents), f"block {block} is shared, and an owner still writes it"
                if is_writer:
                    writers.add(block)
                else:
                    assert contents.setdefault(block, content) == content, f"block {block} has owners that differ"
        for holding in incoming:
            for index, block in enumerate(holding.blocks):
                assert block not in writers, f"block {block} belongs to a migration while a request writes it"
                content = (holding.cache_salt, holding.token_ids[: (index + 1) * size])
                assert contents.get(block, content) == content, f"block {block} has owners that differ"
