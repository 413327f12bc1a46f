"""A worker's engine as its actor drives it: the engine's threads, its KV transfer, and the watch over its memory."""

import asyncio
from collections.abc import Callable
from typing import Final

from actorserve.actors.worker import EngineEffect
from actorserve.core.messages import MemoryLimit, Message, Peer
from workers.engine import Engine
from workers.engines.engine_thread import EngineThread
from workers.kv_transfer.transfer import KVTransfer
from workers.memory import PoolWatch

_MEASURE_MEMORY_S: Final = 1.0


class WorkerEngine:
    """Implements ``actors.worker.EngineShell``. ``memory``: None when no other process can take the pools' memory.

    Make it on the running event loop.
    """

    def __init__(self, engine: Engine, transfer: KVTransfer, memory: PoolWatch | None) -> None:
        self._engine = engine
        self._transfer = transfer
        self._memory = memory
        self._thread = EngineThread(engine, transfer)

    async def run(self, tell: Callable[[Message], None]) -> None:
        self._thread.start(tell)
        async with asyncio.TaskGroup() as group:
            if self._memory is not None:
                group.create_task(self._watch_memory(self._memory, tell), name="memory")
            await self._thread.failure

    def perform(self, effect: EngineEffect) -> None:
        self._thread.perform(effect)

    def forget(self, peer: Peer) -> None:
        self._transfer.forget(peer)

    def stop(self, patience_s: float) -> None:
        self._transfer.close()
        self._thread.stop(patience_s)

    async def _watch_memory(self, memory: PoolWatch, tell: Callable[[Message], None]) -> None:
        """Tell the core how many blocks the pool's memory has room for, each time that the number changes."""
        told = self._engine.num_blocks
        while True:
            num_blocks = memory.num_usable_blocks(self._engine.num_written_host_blocks)
            if num_blocks != told:
                tell(MemoryLimit(num_blocks))
                told = num_blocks
            await asyncio.sleep(_MEASURE_MEMORY_S)
