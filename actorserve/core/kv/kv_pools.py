"""An instance's two pools of KV blocks, and the copies from other instances that write into them."""

from collections.abc import Iterable
from dataclasses import dataclass

from actorserve.core.effects import CancelFetch
from actorserve.core.kv.block_allocator import BlockAllocator
from actorserve.core.kv.kv_holding import KVHolding
from actorserve.core.kv.layer_groups import NO_BLOCK
from actorserve.core.messages import Transfer


@dataclass(slots=True)
class _Fetch:
    """A copy from another instance, and the blocks that it writes. ``holding`` is None once it was released."""

    transfer: Transfer
    blocks: tuple[int, ...]
    pool: BlockAllocator
    holding: KVHolding | None


class KVPools:
    """The device's pool and the host's pool.

    A copy from another instance (``Fetch``) holds the blocks that it writes until the engine reports its end, because
    the copy may still write them after the holding has been released.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, tokens_per_block: int, bytes_per_block: int) -> None:
        """``bytes_per_block``: of one group's layers (``core.kv.layer_groups``)."""
        self.device = BlockAllocator(num_blocks)
        self.host = BlockAllocator(num_host_blocks)
        self.tokens_per_block = tokens_per_block
        self.bytes_per_block = bytes_per_block
        self._fetches: dict[int, _Fetch] = {}  # by copy id
        self._num_copies = 0

    def bytes_of_blocks(self, num_blocks: int) -> int:
        return num_blocks * self.bytes_per_block

    def next_copy_id(self) -> int:
        """An id for a copy of any kind; ids are never used twice."""
        self._num_copies += 1
        return self._num_copies

    # --- copies from other instances ---------------------------------------------------------------------------------

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    def num_released_blocks(self, pool: BlockAllocator) -> int:
        """Blocks of this pool that a copy still writes although their holding was released."""
        return sum([len(fetch.blocks) for fetch in self._fetches.values() if not fetch.holding and fetch.pool is pool])

    def begin_fetch(
        self, transfer: Transfer, holding: KVHolding, blocks: tuple[int, ...], *, into_host: bool = False
    ) -> int:
        """From now on a copy writes these blocks of the holding, until ``on_fetched``. Returns the copy's id."""
        holding.copy_id = copy_id = self.next_copy_id()
        self._fetches[copy_id] = _Fetch(transfer, blocks, self.host if into_host else self.device, holding)
        return copy_id

    def is_fetch(self, copy_id: int) -> bool:
        return copy_id in self._fetches

    def on_fetched(self, copy_id: int) -> Transfer | None:
        """The copy succeeded or failed. Returns its transfer; None if its holding was released meanwhile.

        Raises: KeyError for a copy that is not in flight.
        """
        fetch = self._fetches.pop(copy_id)
        if fetch.holding is None:
            fetch.pool.free(fetch.blocks)
            return None
        fetch.holding.copy_id = None
        return fetch.transfer

    def release(self, holding: KVHolding) -> list[CancelFetch]:
        """Free all blocks of a holding that no request owns, except those that a copy writes.

        They are freed once the copy has ended, and the effects that are returned end it soon.
        """
        written: set[int] = set()
        cancels: list[CancelFetch] = []
        if (copy_id := holding.copy_id) is not None:
            fetch = self._fetches[copy_id]
            fetch.holding = None
            written.update(fetch.blocks)
            cancels.append(CancelFetch(copy_id))
            holding.copy_id = None
        written.add(NO_BLOCK)
        # The holding has blocks of one pool only.
        self.device.free([block for block in holding.blocks if block not in written])
        self.host.free([block for block in holding.host_blocks if block not in written])
        holding.blocks = []
        holding.host_blocks = []
        return cancels

    # --- invariants --------------------------------------------------------------------------------------------------

    def validate(self, device: Iterable[Iterable[int]], host: Iterable[Iterable[int]], fetching: set[int]) -> None:
        """Raise AssertionError unless each block is owned as often as these lists and released copies hold it.

        ``device`` and ``host`` are the blocks of each owner, ``fetching`` the copy ids of all holdings.
        """
        for copy_id, fetch in self._fetches.items():
            is_released = fetch.holding is None
            assert is_released != (copy_id in fetching), f"copy {copy_id} has no owner, or an owner that left"
        released = [fetch for fetch in self._fetches.values() if fetch.holding is None]
        self.device.validate([*device, *(fetch.blocks for fetch in released if fetch.pool is self.device)])
        self.host.validate([*host, *(fetch.blocks for fetch in released if fetch.pool is self.host)])
