"""A driver that hangs is reported as one that tells nothing. Event loops go on, and processes end."""

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from actorserve.actors.node import open_node
from actorserve.cluster.network import LocalNetwork
from actorserve.core.effects import AddToEngine, Effect, PutBackLimits, ReadPower, RunStep, SetCaps
from actorserve.core.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Peer,
    PowerRead,
    PowerReading,
    RequestSpec,
    Role,
    SamplingParams,
    StepDone,
    StepPlan,
)
from actorserve.settings import ClusterSettings
from tests.folders import make_runtime_folder
from tests.workers.power.fake_driver import FakeDriver
from workers import worker_engine
from workers.engines.fake_engine import FakeEngine
from workers.kv_transfer.transfer import KVTransfer
from workers.power import actuator
from workers.power.actuator import ActuatorActor
from workers.power.caps import PowerCaps
from workers.power.driver_thread import DriverThread
from workers.power.former_limits import FormerLimits
from workers.power.nvml import Gpus, open_gpus
from workers.power.sensor import open_sensor
from workers.worker_engine import WorkerEngine

DEADLINE_S = 30.0
PATIENCE_S = 0.2
SPEC = RequestSpec("r", (1, 2, 3), SamplingParams(seed=1, max_tokens=4))
T = TypeVar("T")
STEP = RunStep(StepPlan(1, ("r",), (0,), ((1, 2, 3),), ((0,),), (True,)))


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_engine, actuator):
        monkeypatch.setattr(module, "PATIENCE_S", PATIENCE_S)


@pytest.fixture
def hang(loaded_driver: FakeDriver) -> Iterator[Callable[[bool], None]]:
    """Makes calls of all GPUs hang, or lets them return."""

    def set_hanging(hangs: bool) -> None:
        for gpu in (0, 1):
            if hangs:
                loaded_driver.put(gpu, "hang", 1)
            else:
                (loaded_driver.folder / str(gpu) / "hang").unlink(missing_ok=True)

    yield set_hanging
    set_hanging(False)  # so that threads do not use the library when it is gone


@pytest.fixture
def transfer() -> Iterator[KVTransfer]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        transfer = KVTransfer(FakeEngine().kv, f"ipc://{folder}/kv.sock", b"key")
        yield transfer
        transfer.close()


async def test_a_worker_computes_while_its_driver_hangs(hang: Callable[[bool], None], transfer: KVTransfer) -> None:
    """Meanwhile a reading knows its GPU's name only, and steps run. Readings go on when the driver answers again."""
    told: asyncio.Queue[Message] = asyncio.Queue()
    worker = WorkerEngine(FakeEngine(), transfer, None, partial(open_sensor, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-0"}))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(told.put_nowait))
        reading = await told.get()
        assert isinstance(reading, PowerReading)
        assert reading.draw_watts == 100.0
        hang(True)
        while reading != PowerReading("GPU-0"):
            reading = await told.get()
        worker.perform(AddToEngine(SPEC))
        worker.perform(STEP)
        assert isinstance(await told.get(), StepDone), "and nothing more of the power is told while the driver hangs"
        hang(False)
        reading = await told.get()
        assert isinstance(reading, PowerReading)
        assert reading.draw_watts == 100.0
        running.cancel()
    worker.stop(DEADLINE_S)


async def test_a_worker_whose_driver_hangs_at_first_serves_without_power(
    hang: Callable[[bool], None], transfer: KVTransfer
) -> None:
    """Opening the sensor does not hold the worker up."""
    hang(True)
    told: asyncio.Queue[Message] = asyncio.Queue()
    worker = WorkerEngine(FakeEngine(), transfer, None, partial(open_sensor, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-0"}))
    worker.perform(AddToEngine(SPEC))
    worker.perform(STEP)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(told.put_nowait))
        assert isinstance(await told.get(), StepDone)
        running.cancel()
    worker.stop(DEADLINE_S)


class Heard:
    """A core that does nothing but keep what it gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
        self.messages.put_nowait(message)
        return []

    def next_deadline(self) -> float | None:
        return None

    async def read(self) -> PowerRead:
        message = await self.messages.get()
        assert isinstance(message, PowerRead)
        return message


class HeldDriver(DriverThread):
    """Makes the next call when the test says so."""

    def __init__(self) -> None:
        self._held: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._held.append((function, future))
        return future

    async def answer(self) -> None:
        function, future = self._held.popleft()
        future.set_result(function())
        await asyncio.sleep(0)  # the actuator gets it


@asynccontextmanager
async def running_actuator(
    folder: Path, driver: DriverThread | None = None
) -> AsyncIterator[tuple[ActuatorActor, Heard]]:
    gpus, core = open_gpus(), Heard()
    assert isinstance(gpus, Gpus)
    hello, network = Hello(PROTOCOL_VERSION, Role.POWER), LocalNetwork(make_runtime_folder())
    node = open_node("power", hello, ClusterSettings(journal_dir=None), network)
    actor = ActuatorActor(core, node, PowerCaps(gpus, FormerLimits(folder)), driver or DriverThread())
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(actor.run())
        yield actor, core


async def test_an_actuator_reports_a_hanging_driver_as_unknown(
    hang: Callable[[bool], None], loaded_driver: FakeDriver, tmp_path: Path
) -> None:
    """Meanwhile devices count at the higher one of their cap and of the one being set. Of the caps that were ordered
    then, the last ones are set when the driver answers again, and the end puts the former limits back.
    """
    async with running_actuator(tmp_path / "state") as (actor, core):
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (300.0, 300.0)))
        actor.perform(ReadPower())
        read = await core.read()
        assert [(power.cap_watts, power.draw_watts) for power in read.devices] == [(300.0, 100.0)] * 2
        hang(True)
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (450.0, 250.0)))
        while read.devices[0].can_set:
            await asyncio.sleep(PATIENCE_S)
            actor.perform(ReadPower())
            read = await core.read()
        assert [(power.cap_watts, power.draw_watts) for power in read.devices] == [(450.0, None), (300.0, None)]
        actor.perform(SetCaps(("GPU-0",), (400.0,)))
        actor.perform(SetCaps(("GPU-0",), (350.0,)))
        hang(False)
        while not read.devices[0].can_set or read.devices[0].cap_watts != 350.0:
            read = await core.read()
        assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (350.0, 250.0)
        await actor.end()
        assert (loaded_driver.limit(0), loaded_driver.limit(1)) == (700.0, 700.0)


async def test_caps_that_wait_for_a_hanging_driver_count(hang: Callable[[bool], None], tmp_path: Path) -> None:
    """A device counts at the cap that was ordered while the driver hangs, because it is set when the driver answers."""
    async with running_actuator(tmp_path / "state") as (actor, core):
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (300.0, 300.0)))
        actor.perform(ReadPower())
        read = await core.read()
        hang(True)
        actor.perform(ReadPower())
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (250.0, 650.0)))
        while read.devices[0].can_set:
            await asyncio.sleep(PATIENCE_S)
            actor.perform(ReadPower())
            read = await core.read()
        assert [power.cap_watts for power in read.devices] == [300.0, 650.0]
        hang(False)
        await actor.end()


@pytest.mark.usefixtures("loaded_driver")
async def test_a_repeated_order_does_not_void_readings(tmp_path: Path) -> None:
    """The coordinator repeats an order until it hears of a reading after it. So with a driver that takes longer than
    that, a reading counts although the same order has come again.
    """
    driver, order = HeldDriver(), SetCaps(("GPU-0",), (300.0,))
    async with running_actuator(tmp_path / "state", driver) as (actor, core):
        for _ in range(4):
            actor.perform(order)
            actor.perform(ReadPower())
            await driver.answer()
        assert not core.messages.empty()
        assert (await core.read()).devices[0].cap_watts == 300.0
        actor.stop()


@pytest.mark.usefixtures("loaded_driver")
@pytest.mark.parametrize("raises", [SetCaps(("GPU-0",), (650.0,)), PutBackLimits()])
async def test_a_cap_that_was_raised_counts_before_it_is_read(tmp_path: Path, raises: Effect) -> None:
    """The driver sets the cap, and hangs at the reading after it. So the cap before it is not in force any more."""
    driver = HeldDriver()
    async with running_actuator(tmp_path / "state", driver) as (actor, core):
        actor.perform(SetCaps(("GPU-0",), (300.0,)))
        actor.perform(ReadPower())
        await driver.answer()
        await driver.answer()
        assert (await core.read()).devices[0].cap_watts == 300.0
        actor.perform(raises)
        actor.perform(ReadPower())
        await driver.answer()
        await asyncio.sleep(2 * PATIENCE_S)
        actor.perform(ReadPower())
        late = (await core.read()).devices[0]
        assert not late.can_set
        assert late.cap_watts is not None
        assert late.cap_watts >= 650.0
        await driver.answer()
        actor.stop()


@pytest.mark.usefixtures("loaded_driver")
async def test_nothing_is_told_before_the_first_reading(tmp_path: Path) -> None:
    """A report without devices would say that there are none."""
    driver = HeldDriver()
    async with running_actuator(tmp_path / "state", driver) as (actor, core):
        actor.perform(ReadPower())
        await asyncio.sleep(2 * PATIENCE_S)
        actor.perform(ReadPower())
        await asyncio.sleep(0.0)
        assert core.messages.empty()
        await driver.answer()
        assert len((await core.read()).devices) == 2
        actor.stop()


async def test_former_limits_are_put_back_before_newer_caps(
    hang: Callable[[bool], None], loaded_driver: FakeDriver, tmp_path: Path
) -> None:
    """Caps that were ordered before the limits are put back are forgotten, and those ordered after it are set."""
    async with running_actuator(tmp_path / "state") as (actor, core):
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (300.0, 300.0)))
        hang(True)
        actor.perform(ReadPower())
        actor.perform(SetCaps(("GPU-0", "GPU-1"), (400.0, 400.0)))
        actor.perform(PutBackLimits())
        actor.perform(SetCaps(("GPU-1",), (350.0,)))
        hang(False)
        while [power.cap_watts for power in (await core.read()).devices] != [700.0, 350.0]:
            actor.perform(ReadPower())
        await actor.end()


async def test_an_actuator_ends_while_its_driver_hangs(
    hang: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The former limits stay on disk for the next one."""
    monkeypatch.setattr(actuator, "_END_S", 2 * PATIENCE_S)
    async with running_actuator(tmp_path / "state") as (actor, core):
        actor.perform(SetCaps(("GPU-0",), (300.0,)))
        actor.perform(ReadPower())
        await core.read()
        hang(True)
        await actor.end()
    assert FormerLimits(tmp_path / "state").watts == {"GPU-0": 700.0}
