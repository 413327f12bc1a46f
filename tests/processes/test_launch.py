"""Completing the settings: port, runtime folder, the workers' devices."""

import json
import socket
import sys
from pathlib import Path

import pytest

from actorserve.errors import SettingsError
from actorserve.processes import launch
from actorserve.processes.launch import Gpu, LaunchError, Placement
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.supervision import SupervisionTree
from actorserve.processes.supervision_tree import supervision_tree
from actorserve.settings import Settings, load_settings


def workers(**values: object) -> Settings:
    return load_settings(None, {"workers": values})


def test_a_port_in_use_is_told() -> None:
    """A port that another process listens on is refused, with a line that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use"):
            launch.free_port("127.0.0.1", port)
    assert launch.free_port("127.0.0.1", port) == port


def test_port_0_takes_a_free_one() -> None:
    """Port 0 becomes a port that can be listened on."""
    port = launch.free_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", port)) as listening:
        assert listening.getsockname()[1] == port


def test_a_host_that_is_not_ours_is_told() -> None:
    """An address of another machine is refused in one line."""
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1 port 8000"):
        launch.free_port("192.0.2.1", 8000)


@pytest.mark.parametrize(
    ("settings", "gpus", "cores", "expected"),
    [
        (workers(), (), 8, Placement(2, (), 4)),
        (workers(), ("GPU-a", "GPU-b", "GPU-c"), 12, Placement(3, ("GPU-a", "GPU-b", "GPU-c"), 4)),
        (workers(count=1), ("GPU-a", "GPU-b"), 12, Placement(1, ("GPU-a", "GPU-b"), 12)),
        (workers(device="cpu"), ("GPU-a",), 2, Placement(2, (), 1)),
        (workers(engine="fake"), ("GPU-a",), 2, Placement(2, (), 1)),
        (workers(count=16), (), 2, Placement(16, (), 1)),
        (workers(count=3, threads=5), (), 2, Placement(3, (), 5)),
        (workers(count=2, kv_cache_bytes=10**9), ("GPU-a",), 8, Placement(2, ("GPU-a",), 4)),
    ],
)
def test_workers_are_placed(settings: Settings, gpus: tuple[str, ...], cores: int, expected: Placement) -> None:
    """One worker per GPU, or two on the CPU; the cores are divided; settings override both."""
    assert launch.place_workers(settings, gpus, cores) == expected


def scaled(max_workers: int, min_workers: int | None = None, **values: object) -> Settings:
    scaling = {"max_workers": max_workers, "min_workers": min_workers}
    return load_settings(None, {"workers": values, "scaling": scaling})


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        (scaled(4), (), Placement(2, (), 2, 2)),
        (scaled(1), (), Placement(1, (), 8, 0)),
        (scaled(8, 4), (), Placement(4, (), 1, 4)),
        (scaled(4, count=1), (), Placement(1, (), 2, 3)),
        (scaled(4, count=1, threads=8), (), Placement(1, (), 8, 3)),
        (scaled(2), ("GPU-a", "GPU-b", "GPU-c"), Placement(2, ("GPU-a", "GPU-b", "GPU-c"), 4, 0)),
        (scaled(3, count=1), ("GPU-a", "GPU-b", "GPU-c"), Placement(1, ("GPU-a", "GPU-b", "GPU-c"), 2, 2)),
    ],
)
def test_cores_are_divided_among_the_maximum_number_of_workers(
    settings: Settings, gpus: tuple[str, ...], expected: Placement
) -> None:
    """With scaling, the maximum number of workers share the cores, and the bounds limit the number at the start."""
    assert launch.place_workers(settings, gpus, 8) == expected


def test_workers_that_start_elsewhere_get_no_cores_here() -> None:
    """Workers that systemd or a command starts have other resources, so they get no cores of this machine."""
    for how in ({"start_with": "systemd"}, {"start_with": "command", "command": "start"}):
        settings = load_settings(None, {"workers": {"count": 2}, "scaling": {"max_workers": 8, **how}})
        assert launch.place_workers(settings, (), 8) == Placement(2, (), 4, 0)


@pytest.mark.parametrize(
    ("settings", "gpus", "why"),
    [
        (workers(device="cuda"), (), "no GPU can be used here"),
        (workers(count=2), ("GPU-a",), "set workers.kv_cache_bytes"),
        (scaled(2, count=1), ("GPU-a",), "2 workers would share 1 GPU.*set workers.kv_cache_bytes"),
        (scaled(2, count=3), (), "workers.count is 3, but scaling allows 1 to 2 workers"),
        (scaled(4, 2, count=1), (), "workers.count is 1, but scaling allows 2 to 4 workers"),
    ],
)
def test_settings_that_this_machine_cannot_meet_are_refused(
    settings: Settings, gpus: tuple[str, ...], why: str
) -> None:
    """Settings with missing GPUs or too many workers are refused, and the error says what to do."""
    with pytest.raises(SettingsError, match=why):
        launch.place_workers(settings, gpus, 4)


def _tree(placement: Placement, folder: Path) -> SupervisionTree:
    return supervision_tree(placement, Settings(), folder / "s.json", folder)


def test_children_get_their_names_and_devices(tmp_path: Path) -> None:
    """The gateway drains first. Every worker sees one GPU, in turn, and a CPU worker sees none."""
    specs = _tree(Placement(3, ("GPU-a", "GPU-b"), 4), tmp_path).children
    assert [spec.name for spec in specs] == ["coordinator", "gateway-0", "worker-0", "worker-1", "worker-2"]
    assert [spec.stop_stage for spec in specs] == [1, 0, 1, 1, 1]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs[2:]] == ["GPU-a", "GPU-b", "GPU-a"]
    assert all(spec.environment["OMP_NUM_THREADS"] == "4" for spec in specs[2:])
    (worker,) = _tree(Placement(1, (), 4), tmp_path).children[2:]
    assert worker.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_spare_workers_are_like_the_others(tmp_path: Path) -> None:
    """Spare workers have the next numbers and devices, and all workers know the maximum number."""
    tree = _tree(Placement(1, ("GPU-a", "GPU-b"), 4, 2), tmp_path)
    specs, spare = tree.children, tree.spare
    assert [spec.name for spec in specs] == ["coordinator", "gateway-0", "worker-0"]
    assert [spec.name for spec in spare] == ["worker-1", "worker-2"]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in spare] == ["GPU-b", "GPU-a"]
    assert all(spec.command[-2:] == ("--count", "3") for spec in (specs[2], *spare))


def test_settings_bound_restarts_and_drains(tmp_path: Path) -> None:
    """The tree carries the settings' restart limits and the drain's time."""
    rules = {"max_restarts": 7, "window_s": 8.0, "backoff_s": 0.5, "max_backoff_s": 9.0}
    settings = load_settings(None, {"supervision": rules, "cluster": {"drain_timeout_s": 3.0}})
    tree = supervision_tree(Placement(1, (), 1), settings, tmp_path / "s.json", tmp_path)
    assert tree.limits == RestartLimits(7, 8.0, 0.5, 9.0)
    assert tree.drain_timeout_s == 3.0


def test_cores_and_memory_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get equal shares of the cores and memory that control groups allow, unless settings override them."""
    monkeypatch.setattr(launch, "usable_cores", lambda: 4)
    monkeypatch.setattr(launch, "available_memory_bytes", lambda: 9000)
    settings, placement = launch.resolve_workers(workers(device="cpu"))
    assert (placement.num_workers, settings.workers.threads, settings.workers.memory_bytes) == (2, 2, 4500)
    settings, _ = launch.resolve_workers(workers(device="cpu", count=3, memory_bytes=77))
    assert (settings.workers.threads, settings.workers.memory_bytes) == (1, 77)
    settings, _ = launch.resolve_workers(scaled(3, count=1, device="cpu"))
    assert (settings.workers.count, settings.workers.memory_bytes) == (1, 3000)
    monkeypatch.setattr(launch, "available_memory_bytes", lambda: 0)
    assert launch.resolve_workers(workers(device="cpu"))[0].workers.memory_bytes == 1  # not None, which means no limit


GIB = 2**30
A100, RTX_4090 = Gpu("GPU-a", 80 * GIB), Gpu("GPU-b", 24 * GIB)


@pytest.mark.parametrize(
    ("gpus", "values", "expected"),
    [
        ((), {}, (64, 512)),
        ((A100,), {}, (256, 8192)),
        ((RTX_4090,), {}, (256, 2048)),
        ((A100, RTX_4090), {}, (256, 2048)),
        ((A100,), {"device": "cpu"}, (64, 512)),
        ((A100,), {"engine": "fake"}, (64, 512)),
        ((A100,), {"max_batch_requests": 32}, (32, 8192)),
        ((A100,), {"max_batch_tokens": 100}, (84, 100)),
        ((), {"max_batch_requests": 1000}, (1000, 1016)),
        ((), {"max_batch_tokens": 17}, (1, 17)),
        ((), {"max_batch_requests": 8, "max_batch_tokens": 24}, (8, 24)),
    ],
)
def test_batches_fit_the_device(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], values: dict[str, object], expected: tuple[int, int]
) -> None:
    """The size of a batch follows the smallest GPU, or the CPU. A setting overrides it, and the other limit follows."""
    monkeypatch.setattr(launch, "find_gpus", lambda: gpus)
    resolved, _ = launch.resolve_workers(workers(**values))
    assert (resolved.workers.max_batch_requests, resolved.workers.max_batch_tokens) == expected
    assert resolved.workers.batch_limits() == expected


def test_gpus_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs that the driver tells have the memory that it tells."""
    listed = json.dumps([{"selector": "GPU-a", "name": "A100", "memory_bytes": 80 * GIB}])
    monkeypatch.setattr(launch, "python_command", lambda: (sys.executable, "-c", f"print({listed!r})"))
    assert launch.find_gpus() == (A100,)


def checkpointed(device: str, every_tokens: int = 64, **values: object) -> Settings:
    return load_settings(
        None, {"workers": {"device": device, **values}, "migration": {"checkpoint_tokens": every_tokens}}
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (checkpointed("cpu"), "set workers.host_kv_bytes"),
        (checkpointed("auto", host_kv_bytes=0), "set workers.host_kv_bytes"),
        (checkpointed("auto", engine="fake"), "set workers.host_kv_bytes"),
        (checkpointed("cuda", host_kv_bytes=0), "set workers.host_kv_bytes"),
        (checkpointed("cuda", swap="recompute"), "which needs workers.swap"),
    ],
)
def test_checkpoints_need_memory(monkeypatch: pytest.MonkeyPatch, settings: Settings, why: str) -> None:
    """Checkpoints without host memory are refused, in a line that names the setting to change."""
    monkeypatch.setattr(launch, "find_gpus", lambda: (Gpu("GPU-a", 24 * 2**30),))
    with pytest.raises(SettingsError, match=f"migration.checkpoint_tokens is 64.*{why}"):
        launch.resolve_workers(settings)


@pytest.mark.parametrize(
    "settings", [checkpointed("cpu", 0), checkpointed("cpu", host_kv_bytes=2**20), checkpointed("cuda")]
)
def test_checkpoints_that_have_memory_are_accepted(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """A GPU's worker has memory for checkpoints by default. Settings without checkpoints are accepted as well."""
    monkeypatch.setattr(launch, "find_gpus", lambda: (Gpu("GPU-a", 24 * 2**30),))
    resolved, _ = launch.resolve_workers(settings)
    assert resolved.migration == settings.migration
