"""The supervision tree of ``actorserve serve``: which processes run on one host, and how they end.

    supervisor                     one_for_one; supervision.max_restarts within supervision.window_s per child
    ├── coordinator    permanent   ends in stage 1
    ├── gateway-0 ...  permanent   ends in stage 0: it finishes its requests while the other children still run
    ├── worker-0 ...   permanent   ends in stage 1
    └── worker-n ...   spare       started when the coordinator asks for a worker; ends in stage 1

When the supervisor ends for any reason, the kernel kills all of its children (``status.die_with_parent``). Under
systemd every process is a unit of its own, and systemd takes the supervisor's place.
"""

from pathlib import Path

from actorserve.processes import child, launch
from actorserve.processes.launch import Placement
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.supervision import ChildSpec, SupervisionTree
from actorserve.settings import Settings

_FIRST, _LAST = 0, 1  # values of ``stop_stage``


def supervision_tree(
    placement: Placement, settings: Settings, settings_file: Path, runtime_dir: Path
) -> SupervisionTree:
    """The children of a server with these settings, which the children read from ``settings_file``."""
    rules = settings.supervision
    python = launch.python_command()

    def command(module: tuple[str, ...], name: str, index: int = 0, count: int = 1) -> tuple[str, ...]:
        return (*python, *module, *child.command_line(name, settings_file, runtime_dir, index, count))

    def worker(index: int) -> ChildSpec:
        name, count = f"worker-{index}", placement.max_workers
        return ChildSpec(name, command(("workers",), name, index, count), _LAST, _worker_environment(placement, index))

    def gateway(index: int) -> ChildSpec:
        name = f"gateway-{index}"
        return ChildSpec(name, command(("actorserve", "gateway"), name, index, settings.http.gateways), _FIRST)

    workers = tuple(worker(index) for index in range(placement.max_workers))
    return SupervisionTree(
        children=(
            ChildSpec("coordinator", command(("actorserve", "coordinator"), "coordinator"), _LAST),
            *(gateway(index) for index in range(settings.http.gateways)),
            *workers[: placement.num_workers],
        ),
        spare=workers[placement.num_workers :],
        limits=RestartLimits(rules.max_restarts, rules.window_s, rules.backoff_s, rules.max_backoff_s),
        drain_timeout_s=settings.cluster.drain_timeout_s,
    )


def _worker_environment(placement: Placement, index: int) -> dict[str, str]:
    selectors = placement.selectors
    return {
        "CUDA_VISIBLE_DEVICES": selectors[index % len(selectors)] if selectors else "",
        # The numeric libraries read this when they load, before the worker could set it itself.
        "OMP_NUM_THREADS": str(placement.threads_per_worker),
    }
