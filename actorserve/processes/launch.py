"""Completes the settings before any process starts: the port, the devices, the threads. It does not load torch."""

import errno
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from actorserve.errors import ActorserveError, SettingsError
from actorserve.host import available_memory_bytes, usable_cores
from actorserve.options import CPU_LIMITS, gpu_limits
from actorserve.settings import Settings

DEFAULT_CPU_WORKERS = 2
_DEVICES_TIMEOUT_S = 60.0  # an idle driver takes long to start


class LaunchError(ActorserveError):
    """The system cannot be started on this machine."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that workers may use; ``selector`` is what CUDA_VISIBLE_DEVICES takes to choose it alone."""

    selector: str
    memory_bytes: int


@dataclass(frozen=True)
class Placement:
    """The devices of the workers: worker i runs on ``selectors[i % len(selectors)]``, or on the CPU without selectors.

    ``num_workers`` workers run from the start, and ``num_spare`` more may be started later.
    """

    num_workers: int
    selectors: tuple[str, ...]
    threads_per_worker: int
    num_spare: int = 0

    @property
    def max_workers(self) -> int:
        """The maximum number of workers, which share the cores and the memory."""
        return self.num_workers + self.num_spare


def replace(settings: Settings, section: str, **values: Any) -> Settings:
    """The settings with some values of a section replaced. They are validated like a settings file."""
    fields = settings.model_dump()
    fields[section] |= values
    return Settings.model_validate(fields)


def free_port(host: str, port: int, setting: str = "--port") -> int:
    """``port``, if a process can listen on it; a free port for 0. ``setting`` is what chooses another port.

    Raises: LaunchError for a port in use, or a host that is not this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            # As in the server: a port with connections in TIME_WAIT counts as free.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(1)
            return int(listening.getsockname()[1])
    except socket.gaierror as error:
        raise LaunchError(f"cannot listen on host {host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"port {port} on {host} is in use; choose another with {setting}") from None
        raise LaunchError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def python_command() -> tuple[str, ...]:
    """The command that runs a module with our own Python, with -P if this process has it."""
    return (sys.executable, *(("-P",) if sys.flags.safe_path else ()), "-m")


def find_gpus() -> tuple[Gpu, ...]:
    """Every usable GPU, in order; empty without a GPU.

    Another process lists the GPUs, because this process must not load the GPU driver.

    Raises: LaunchError when the GPUs cannot be listed.
    """
    command = [*python_command(), "workers.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S, check=True)
        return tuple(Gpu(str(device["selector"]), int(device["memory_bytes"])) for device in json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the GPU driver did not answer in {_DEVICES_TIMEOUT_S:.0f} s; try --device cpu") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        reason = lines[-1] if lines else "no reason given"
        raise LaunchError(f"cannot list the GPUs: {reason}; --device cpu serves without them") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"cannot list the GPUs: {error}") from None


def place_workers(settings: Settings, gpus: tuple[str, ...], num_cores: int, *, as_units: bool = False) -> Placement:
    """The default is one worker per GPU, or two CPU workers. Spare workers are those that scaling may add.

    ``as_units``: the workers are units of systemd, not children of a supervisor.

    Raises: SettingsError for settings that this machine cannot meet.
    """
    wanted = settings.workers
    if wanted.device == "cpu" or wanted.engine == "fake":
        gpus = ()
    elif wanted.device == "cuda" and not gpus:
        raise SettingsError("workers.device is cuda, but no GPU can be used here")
    count, most = _num_workers(settings, len(gpus) or DEFAULT_CPU_WORKERS, as_units)
    if gpus and most > len(gpus) and wanted.kv_cache_bytes is None:
        raise SettingsError(
            f"{most} workers would share {len(gpus)} GPU(s): set workers.kv_cache_bytes, the KV memory of one worker"
        )
    return Placement(count, gpus, wanted.threads or max(1, num_cores // most), most - count)


def _num_workers(settings: Settings, usual: int, as_units: bool) -> tuple[int, int]:
    """How many workers run on this machine from the start, and the maximum."""
    scaling, count = settings.scaling, settings.workers.count
    if scaling.max_workers is None:
        return count or usual, count or usual
    least, most = scaling.min_workers or 1, scaling.max_workers
    if count is None:
        count = min(max(usual, least), most)
    elif not least <= count <= most:
        raise SettingsError(f"workers.count is {count}, but scaling allows {least} to {most} workers")
    if as_units and scaling.start_with == "processes":
        raise SettingsError('scaling.start_with is "processes", which needs a supervisor: choose "systemd" for units')
    return count, most if scaling.start_with == ("systemd" if as_units else "processes") else count


def resolve_workers(settings: Settings, *, as_units: bool = False) -> tuple[Settings, Placement]:
    """The settings with all of the workers' values filled in that follow from this machine, and each worker's device.

    Raises: SettingsError for settings that this machine cannot meet; LaunchError.
    """
    asks_driver = settings.workers.device != "cpu" and settings.workers.engine != "fake"
    gpus = find_gpus() if asks_driver else ()
    placement = place_workers(settings, tuple(gpu.selector for gpu in gpus), usable_cores(), as_units=as_units)
    # The smallest GPU decides, because a request may move from any worker to any other.
    usual = gpu_limits(min(gpu.memory_bytes for gpu in gpus)) if placement.selectors else CPU_LIMITS
    limits = settings.workers.batch_limits(usual)
    # The memory is divided once, before any worker starts, because a worker cannot know how much the others will take.
    memory_bytes = available_memory_bytes() // placement.max_workers
    resolved = replace(
        settings,
        "workers",
        count=placement.num_workers,
        device="cuda" if placement.selectors else "cpu",
        threads=placement.threads_per_worker,
        max_batch_requests=limits.requests,
        max_batch_tokens=limits.tokens,
        memory_bytes=settings.workers.memory_bytes or max(1, memory_bytes),  # 0 would mean no limit
    )
    _check_checkpoints(resolved)
    return resolved, placement


def _check_checkpoints(settings: Settings) -> None:
    """Refuse checkpoints for workers without a host KV pool, because checkpoints are kept in it."""
    workers, every_tokens = settings.workers, settings.migration.checkpoint_tokens
    if every_tokens == 0:
        return
    if workers.swap == "recompute":
        raise SettingsError(
            f'migration.checkpoint_tokens is {every_tokens}, which needs workers.swap to be "proactive" or "reactive"'
        )
    if not workers.host_kv_bytes and (workers.device == "cpu" or workers.host_kv_bytes == 0):
        raise SettingsError(
            f"migration.checkpoint_tokens is {every_tokens}, which needs memory for the copies: set "
            "workers.host_kv_bytes (CPU workers have none by default)"
        )
