"""The coordinator actor starts workers for its core. Also the config of that core."""

import asyncio

import pytest

from actorserve.actors.coordinator import CoordinatorActor
from actorserve.actors.scaler import ScalerError
from actorserve.core.effects import Effect, ReloadKeys, StartWorker
from actorserve.core.messages import LOCAL, Drain, InstanceRole, Message, Peer, StartFailed
from actorserve.core.operations.process_verbs import keys_answer
from actorserve.core_configs import cluster_config
from actorserve.processes.reload import Reloaded
from actorserve.settings import load_settings
from tests.actors.cluster import ScriptedCore, lone_node

DEADLINE_S = 10.0


class _FailingScaler:
    async def start_worker(self, role: InstanceRole | None) -> None:
        raise ScalerError("no space")


async def test_a_worker_that_cannot_be_started_is_told_to_the_core() -> None:
    """The coordinator starts a worker when its core asks for one, and tells the core if the start has failed."""
    stopped = asyncio.Event()

    class Core(ScriptedCore):
        def handle(self, message: Message, now: float, sender: Peer | None = None) -> list[Effect]:
            if isinstance(message, StartFailed):
                stopped.set()
            return super().handle(message, now, sender)

    core = Core({Drain: [StartWorker()]})
    node = lone_node("coordinator", asyncio.get_running_loop().time)
    coordinator = CoordinatorActor(core, node, _FailingScaler())
    coordinator.tell(Drain())
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(coordinator.run())
        await stopped.wait()
        coordinator.stop()
    assert core.seen == [Drain(), StartFailed()]


def test_a_coordinator_without_a_scaler_starts_no_worker() -> None:
    """If the number of workers is fixed, a StartWorker from the core is a bug."""
    core = ScriptedCore({Drain: [StartWorker()]})
    coordinator = CoordinatorActor(core, lone_node("coordinator", lambda: 0.0))
    coordinator.tell(Drain())
    with pytest.raises(TypeError, match="coordinator was asked for StartWorker"):
        coordinator.step()


def test_the_core_is_told_what_keys_were_read() -> None:
    """The coordinator's own files count, too, and what could not be read is named."""
    core = ScriptedCore({Drain: [ReloadKeys(LOCAL, "7")]})
    coordinator = CoordinatorActor(core, lone_node("coordinator", lambda: 0.0))
    coordinator.on_reload_keys.append(lambda: Reloaded(["keys"], ["certificate"]))
    coordinator.tell(Drain())
    while coordinator.step():
        pass
    assert core.seen == [Drain(), keys_answer("7", ["keys"], ["certificate"])]


@pytest.mark.parametrize(
    ("load_report_s", "death_after_s", "expected_s"),
    [(0.2, 2.0, 1.0), (0.2, 20.0, 10.0), (0.5, 2.0, 2.5)],
)
def test_a_short_silence_is_no_illness(load_report_s: float, death_after_s: float, expected_s: float) -> None:
    """A worker counts as unwell after five missing reports, and not before half of death_after_s."""
    cluster = {"load_report_s": load_report_s, "death_after_s": death_after_s}
    assert cluster_config(load_settings(None, {"cluster": cluster})).report_ttl_s == pytest.approx(expected_s)


def test_scaling_counts_the_workers_that_start_with_the_server() -> None:
    """The first workers are still starting when the coordinator begins. Without scaling they are not counted."""
    settings = load_settings(None, {"workers": {"count": 3}, "scaling": {"max_workers": 4, "start_timeout_s": 7.0}})
    scaling = cluster_config(settings).scaling
    assert scaling is not None
    assert (scaling.num_initial, scaling.max_workers, scaling.start_timeout_s) == (3, 4, 7.0)
    assert cluster_config(load_settings(None, {"workers": {"count": 3}})).scaling is None
