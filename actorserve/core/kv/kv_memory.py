"""Where each request's KV lies: in the device's pool, in the host's pool, or in flight between them.

A started request holds device blocks, host blocks, or both while a swap is in flight. Until the engine reports the end
of a copy, the blocks that it reads are not freed and the blocks that it writes are not used. If a request leaves during
a copy, the copy keeps the request's blocks until its end.

Iterations in flight may name a request that is swapped out or dropped meanwhile. Its swap begins, or its blocks are
free, when the last of them has ended, because until then they write these blocks.

Layers with a sliding window (``core.kv.layer_groups``) give up the blocks that no token to come sees when the iteration
that last reads them has ended. The iteration in flight behind it feeds later tokens, and does not read them.

FastServe (section 4.2) copies the whole KV of a request in both directions. Here a swap in skips blocks that still lie
in the device's pool under their content's name (``core.kv.prefix_cache``).
"""

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from actorserve.core.effects import Effects, SwapIn, SwapOut
from actorserve.core.kv.block_allocator import rows_for
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.kv_pools import KVPools
from actorserve.core.kv.layer_groups import NO_BLOCK, Rows
from actorserve.core.kv.prefix_cache import Found, PrefixCache


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

    def __init__(
        self,
        pools: KVPools,
        reclaimable: ReclaimableBlocks,
        effects: Effects,
        rows: Rows,
        *,
        prefix_cache: bool,
    ) -> None:
        self.pools = pools
        self.device = pools.device
        self.host = pools.host
        self.tokens_per_block = pools.tokens_per_block
        self.rows = rows
        self.prefixes = PrefixCache(pools.device, rows, pools.tokens_per_block, prefix_cache)
        self.num_freeing_blocks = 0  # device blocks that are free once the swaps and steps in flight are done
        self.num_ended_steps = 0  # the newest step that has ended; steps end in the order of their numbers
        self.num_swap_outs = 0
        self.num_copied_blocks = 0
        self._reclaimable = reclaimable
        self._effects = effects
        self._bytes_per_block = pools.bytes_per_block
        self._num_groups = rows.num_groups
        self._has_windows = rows.num_windowed > 0
        self._max_chunk_tokens = rows.max_chunk_tokens
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
    def device_bytes(self) -> int:
        """The device memory for KV."""
        return self.device.num_blocks * self._bytes_per_block

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

    def rows_for(self, num_tokens: int) -> int:
        """Rows that hold the KV of ``num_tokens`` tokens."""
        return rows_for(num_tokens, self.tokens_per_block)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of ``num_tokens`` tokens holds at a time."""
        return self.rows.shape.num_blocks(rows_for(num_tokens, self.tokens_per_block))

    def blocks_of(self, holding: KVHolding) -> int:
        """Blocks for the KV of all its tokens, as far as it is kept."""
        num_rows = rows_for(holding.num_tokens, self.tokens_per_block)
        if not self._has_windows:
            return num_rows
        first_row = holding.first_row
        return self.rows.count(0, num_rows, first_row, self.rows.end_row(num_rows, first_row))

    def num_held(self, holding: KVHolding) -> int:
        """Device blocks that it has."""
        if not self._has_windows:
            return len(holding.blocks)
        num_rows = len(holding.blocks) // self._num_groups
        return self.rows.count(0, num_rows, holding.first_row, holding.end_row)

    def bytes_of(self, holding: KVHolding) -> int:
        """Bytes of the KV of all its tokens."""
        return self.blocks_of(holding) * self._bytes_per_block

    def bytes_of_blocks(self, num_blocks: int) -> int:
        return num_blocks * self._bytes_per_block

    def blocks_wanted(self, holding: KVHolding) -> int:
        """How many free device blocks it would take, given that it holds none on the device."""
        return self.prefixes.num_blocks_wanted(holding)

    def has_blocks(self, holding: KVHolding) -> bool:
        """Whether it has device blocks for all tokens that the next iteration may feed, and for all of its tokens in
        layers without a window.
        """
        if holding.num_tokens * self._num_groups > len(holding.blocks) * self.tokens_per_block:
            return False
        if not self._has_windows:
            return True
        num_tokens = min(holding.num_tokens, holding.num_fed + self._max_chunk_tokens)
        return num_tokens <= holding.end_row * self.tokens_per_block

    def num_missing(self, holding: KVHolding) -> int:
        """How many device blocks it takes when it grows: those for all of its tokens, as far as their KV is kept."""
        return self.blocks_of(holding) - self.num_held(holding)

    def start(self, holding: KVHolding) -> None:
        """Give a waiting request the blocks that it wants; they must be free. Found rows count as computed."""
        found = self.prefixes.find(holding)
        taken = self._take(holding, found)
        assert taken
        self.prefixes.on_started(holding, found.num_rows)

    def grow(self, holding: KVHolding) -> bool:
        """Ensure the device blocks that ``has_blocks`` asks for. False, with none allocated, if too few are free."""
        return self.has_blocks(holding) or self._fill(holding)

    def add_block(self, holding: KVHolding) -> bool:
        """Give it one more device block, in a model without windows. False if none is free."""
        blocks = self.device.allocate(1)
        if blocks is None:
            return False
        holding.blocks += blocks
        return True

    def reserve(self, holding: KVHolding, num_spare: int) -> int | None:
        """Give an incoming migration device blocks for all of its tokens, and leave ``num_spare`` blocks free.

        Its first ``num_computed`` tokens have KV elsewhere, in layers with a window from ``first_row`` on. Returns how
        many of the rows hold it here already, found in the prefix cache. None, with nothing reserved, if too few blocks
        are free.
        """
        if self.blocks_wanted(holding) + num_spare > self.device.num_free_blocks:
            return None
        found = self.prefixes.find(holding)
        return found.num_rows if self._take(holding, found) else None

    def extend(self, holding: KVHolding) -> bool:
        """Ensure an incoming migration's device blocks for all of its tokens, after it got more of them and more KV.
        False, with none allocated, if too few are free.
        """
        self._give_up(holding, self.first_seen(holding.num_computed))
        return self._fill(holding)

    def first_seen(self, num_computed: int) -> int:
        """The first row whose blocks a request with so many computed tokens must have in layers with a window."""
        return self.rows.first_seen(num_computed // self.tokens_per_block)

    def _take(self, holding: KVHolding, found: Found) -> bool:
        """Give a holding that has none its device blocks, with those that were found. False if too few are free."""
        rows, num_rows = self.rows, self.rows_for(holding.num_tokens)
        first_row = found.first_row
        end_row = rows.end_row(num_rows, first_row)
        names = self.prefixes.found_names(holding, found)
        blocks = self.device.allocate(rows.count(0, num_rows, first_row, end_row), names)
        if blocks is None:
            return False
        holding.blocks = rows.place(blocks, 0, num_rows, first_row, end_row)
        holding.first_row, holding.end_row = first_row, end_row
        return True

    def _fill(self, holding: KVHolding) -> bool:
        """Give a holding the device blocks that it lacks. False, with none allocated, if too few are free."""
        blocks = self.device.allocate(self.num_missing(holding))
        if blocks is None:
            return False
        if not self._has_windows:
            holding.blocks += blocks
            return True
        rows = self.rows
        begin, end = len(holding.blocks) // self._num_groups, self.rows_for(holding.num_tokens)
        end_row = rows.end_row(end, holding.first_row)
        # New rows have places for all groups, and older ones may lack the windowed groups' blocks.
        num_older = rows.num_windowed * max(0, min(begin, end_row) - holding.end_row)
        rows.fill(holding.blocks, holding.end_row, min(begin, end_row), blocks[:num_older])
        holding.blocks += rows.place(blocks[num_older:], begin, end, holding.end_row, end_row)
        holding.end_row = end_row
        return True

    def _give_up(self, holding: KVHolding, first_row: int) -> None:
        """Free the windowed groups' device blocks before a row."""
        if first_row > holding.first_row:
            end_row = min(first_row, holding.end_row)
            self.device.free(self.rows.give_up(holding.blocks, holding.first_row, end_row))
            holding.first_row, holding.end_row = first_row, max(first_row, holding.end_row)

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
        self._free(self.rows.held(blocks), holding)
        self.host.free(self.rows.held(host_blocks))
        holding.blocks = []
        holding.host_blocks = []
        holding.first_row = holding.end_row = 0
        holding.num_computed = holding.num_ahead = 0

    def share_computed(self, holding: KVHolding, num_fed: int) -> None:
        """Let others find the rows that the ``num_fed`` newest computed tokens have filled, and give up blocks of
        layers with a window that no token sees any more. Not while a swap reads them, because then their owner may not
        change.
        """
        if holding.copy_id is not None:
            return
        if replaced := self.prefixes.share_computed(holding, num_fed):
            self._free(replaced, holding)
        if self._has_windows:
            self._give_up(holding, self.rows.first_kept(holding.num_computed))

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

    @property
    def num_host_blocks_left(self) -> int:
        """Host blocks that swaps out can take: those that are free, and those that give way to them."""
        return self.host.num_free_blocks + self._reclaimable.num_blocks

    def num_copied(self, holding: KVHolding) -> int:
        """Blocks that a swap out copies."""
        num_rows = self.rows_for(holding.num_fed)
        return self.rows.count(0, num_rows, holding.first_row, num_rows)

    def swap_bytes(self, holding: KVHolding) -> int:
        """Bytes that a swap out copies."""
        return self.num_copied(holding) * self._bytes_per_block

    def num_given_up(self, holding: KVHolding) -> int:
        """Device blocks that are free once the holding has given up its own."""
        return self.device.num_freed_by(self.rows.held(holding.blocks))

    def swap_out(self, holding: KVHolding) -> bool:
        """Begin to copy its KV to the host; its device blocks are free afterwards. False if the host has no room."""
        rows, num_rows = self.rows, self.rows_for(holding.num_fed)
        num_copied = self.num_copied(holding)
        host_blocks = self.host.allocate(num_copied)
        if host_blocks is None:
            self._reclaimable.make_room(num_copied)
            host_blocks = self.host.allocate(num_copied)
        if host_blocks is None:
            return False
        self.device.free(rows.held(holding.blocks[num_rows * self._num_groups :]))
        del holding.blocks[num_rows * self._num_groups :]
        holding.host_blocks = rows.place(host_blocks, 0, num_rows, holding.first_row, num_rows)
        self.num_swap_outs += 1
        copied = rows.held(holding.blocks)
        effect = SwapOut(self.pools.next_copy_id(), tuple(copied), tuple(host_blocks))
        self._begin(effect, holding, self.device.num_freed_by(copied))
        return True

    def swap_in(self, holding: KVHolding) -> None:
        """Begin to copy its KV back, into device blocks for all of its tokens; they must be free."""
        rows, found = self.rows, self.prefixes.find(holding)
        taken = self._take(holding, found)
        assert taken
        holding.num_computed = max(holding.num_computed, found.num_rows * self.tokens_per_block)
        num_found = found.num_rows * self._num_groups
        self.host.free(rows.held(holding.host_blocks[:num_found]))
        del holding.host_blocks[:num_found]
        if holding.host_blocks:
            host_blocks = rows.held(holding.host_blocks)
            end_row = found.num_rows + len(holding.host_blocks) // self._num_groups
            blocks = rows.span(holding.blocks, found.num_rows, end_row, holding.first_row)
            effect = SwapIn(self.pools.next_copy_id(), tuple(host_blocks), tuple(blocks))
            self._begin(effect, holding)
        elif self._has_windows:
            self._give_up(holding, rows.first_kept(holding.num_computed))

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
        num_held_for_others = sum(
            len(self.rows.held(holding.host_blocks)) for holding in checkpoints
        ) + self.pools.num_released_blocks(self.pools.host)
        assert self.num_checkpoint_blocks == num_held_for_others, (
            f"{self.num_checkpoint_blocks} checkpoint blocks, not {num_held_for_others}"
        )
        self.pools.validate(
            [
                *(self.rows.held(holding.blocks) for holding in holdings),
                *(swap.device_blocks for swap in left),
                *(dropped.blocks for dropped in self._dropped),
            ],
            [*(self.rows.held(holding.host_blocks) for holding in holdings), *(swap.host_blocks for swap in left)],
            copying,
        )
        self._validate_contents(requests, incoming)
        if self._has_windows:
            for holding in [*requests, *incoming]:
                self._validate_window(holding)

    def _validate_window(self, holding: KVHolding) -> None:
        """Windowed groups have the blocks that the next tokens see, and no older ones."""
        rows, size, num_groups = self.rows, self.tokens_per_block, self._num_groups
        for row in range(len(holding.blocks) // num_groups):
            expected = num_groups if holding.first_row <= row < holding.end_row else rows.num_full
            num_held = len(rows.held(holding.blocks[row * num_groups : (row + 1) * num_groups]))
            assert num_held == expected, f"row {row} has {num_held} blocks, not {expected}"
        if holding.is_started:
            first_row = holding.first_row
            assert first_row <= rows.first_seen(holding.num_computed // size), "a token sees a row that was given up"
            is_settled = holding.copy_id is None and bool(holding.blocks)
            assert not is_settled or first_row >= rows.first_kept(holding.num_computed), "a row was not given up"

    def _validate_contents(self, requests: Collection[KVHolding], incoming: Collection[KVHolding]) -> None:
        size, num_groups = self.tokens_per_block, self._num_groups
        contents: dict[int, tuple[str, array[int], int]] = {}  # of each full block: salt, tokens up to its end, group
        writers: set[int] = set()  # blocks whose owner still writes them
        for holding in requests:
            num_full = holding.num_computed // size
            held = self.rows.held(holding.blocks)
            assert len(set(held)) == len(held), "a request owns a block twice"
            for index, block in enumerate(holding.blocks):
                if block == NO_BLOCK:
                    continue
                row, group = divmod(index, num_groups)
                content = (holding.cache_salt, holding.token_ids[: (row + 1) * size], group)
                is_writer = row >= num_full
                assert block not in writers, f"block {block} has a second owner while the first still writes it"
                assert not (is_writer and block in contents), f"block {block} is shared, and an owner still writes it"
                if is_writer:
                    writers.add(block)
                else:
                    assert contents.setdefault(block, content) == content, f"block {block} has owners that differ"
        for holding in incoming:
            for index, block in enumerate(holding.blocks):
                if block == NO_BLOCK:
                    continue
                row, group = divmod(index, num_groups)
                assert block not in writers, f"block {block} belongs to a migration while a request writes it"
                content = (holding.cache_salt, holding.token_ids[: (row + 1) * size], group)
                assert contents.get(block, content) == content, f"block {block} has owners that differ"
