"""A worker's engine as its actor drives it: the engine's threads, its KV transfer, and the watch over its memory."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from actorserve.actors.worker import EngineEffect
from actorserve.core.messages import MemoryLimit, Message, Peer, PowerReading
from workers.engine import Engine
from workers.engines.engine_thread import EngineThread
from workers.kv_transfer.transfer import KVTransfer
from workers.pool_watch import GpuPressure, PoolWatch
from workers.power.driver_thread import PATIENCE_S, DriverThread
from workers.power.sensor import PowerSensor

_MEASURE_MEMORY_S: Final = 1.0
_MEASURE_POWER_S: Final = 0.25  # most requests last longer, so their energy is measured and not only estimated


_log: Final = logging.getLogger("actorserve.power")


class WorkerEngine:
    """Implements ``actors.worker.EngineShell``. ``memory``: None when no other process can take the pools' memory.
    ``open_power`` opens the sensor of the power of what the engine computes on, if there is one; None: there is none.

    Make it on the running event loop.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: KVTransfer,
        memory: PoolWatch | None,
        open_power: Callable[[], PowerSensor | None] | None = None,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._memory = memory
        self._open_power = open_power
        self._thread = EngineThread(engine, transfer)

    async def run(self, tell: Callable[[Message], None]) -> None:
        self._thread.start(tell)
        async with asyncio.TaskGroup() as group:
            if self._memory is not None:
                group.create_task(self._watch_memory(self._memory, tell), name="memory")
            if self._open_power is not None:
                group.create_task(self._watch_power(self._open_power, tell), name="power")
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

    async def _watch_power(self, open_power: Callable[[], PowerSensor | None], tell: Callable[[Message], None]) -> None:
        """Tell the core the power, and how many blocks may be used while a GPU's memory is short. While the driver does
        not answer, the power is not known, and serving goes on. The device still has its name then, because the
        coordinator caps it by what this worker does on it.
        """
        driver = DriverThread()
        pressure = GpuPressure(self._engine.num_blocks, self._engine.bytes_per_block)
        told = self._engine.num_blocks
        sensor = await driver.call(open_power)
        while sensor is not None:
            asked = driver.call(sensor.read)
            await asyncio.wait([asked], timeout=PATIENCE_S)
            if not asked.done():
                _log.warning("the driver has not told the power for %.0f s, so it is not known", PATIENCE_S)
                tell(PowerReading(sensor.device))
            reading = await asked
            if reading is not None:
                tell(reading)
            if reading is not None and reading.memory_free_bytes is not None:
                num_blocks = pressure.num_usable_blocks(reading.memory_free_bytes)
                if num_blocks != told:
                    tell(MemoryLimit(num_blocks))
                    told = num_blocks
            await asyncio.sleep(_MEASURE_POWER_S)
