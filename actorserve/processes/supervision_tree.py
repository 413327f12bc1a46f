"""The supervision tree of ``actorserve serve`` and ``actorserve host``: the processes of one host, and how they end.

    supervisor                     one_for_one; supervision.max_restarts within supervision.window_s per child
    ├── coordinator    permanent   ends last
    ├── gateway-0 ...  permanent   ends in stage 0: it finishes its requests while the other children still run
    ├── worker-0 ...   permanent   ends in stage 1
    └── worker-n ...   spare       started when the coordinator asks for a worker; ends in stage 1

With a cluster's file a host runs its share of them, and their names begin with the host's: ``alpha/worker-0``. A worker
there may still have requests of other hosts' gateways when its own host's gateways have ended, so it gets time to
finish them or to move them away, and the coordinator, which helps with that, ends in a stage of its own.

When the supervisor ends for any reason, the kernel kills all of its children (``status.die_with_parent``).
"""

from dataclasses import dataclass
from pathlib import Path

from actorserve.processes import child, launch
from actorserve.processes.launch import Placement
from actorserve.processes.restarts import RestartLimits
from actorserve.processes.runtime_folder import CLUSTER
from actorserve.processes.supervision import ChildSpec, SupervisionTree
from actorserve.settings import Settings

_GATEWAYS, _WORKERS, _COORDINATOR = 0, 1, 2  # values of ``stop_stage``


@dataclass(frozen=True, slots=True)
class HostShare:
    """What of a cluster runs on the host called ``name``. The children read ``cluster_toml``, the cluster's file, from
    the runtime folder; ``cluster_source`` is the file itself, from which they read changes of keys. ``key_file``: None
    if the cluster has no keys. ``cluster_id`` is what the file calls the cluster.
    """

    name: str
    cluster_toml: str
    has_coordinator: bool
    num_gateways: int
    cluster_source: Path | None = None
    key_file: Path | None = None
    cluster_id: str = ""


def supervision_tree(
    placement: Placement, settings: Settings, settings_file: Path, runtime_dir: Path, share: HostShare | None = None
) -> SupervisionTree:
    """The children of a server with these settings, which the children read from ``settings_file``.

    Without a ``share`` the whole cluster runs on this host.
    """
    rules = settings.supervision
    python = launch.python_command()
    prefix = "" if share is None else f"{share.name}/"
    num_gateways = settings.http.gateways if share is None else share.num_gateways

    def command(module: tuple[str, ...], name: str, index: int = 0, count: int = 1) -> tuple[str, ...]:
        arguments = child.command_line(
            name,
            settings_file,
            runtime_dir,
            index,
            count,
            cluster_file=None if share is None else runtime_dir / CLUSTER,
            host="" if share is None else share.name,
            cluster_source=None if share is None else share.cluster_source,
            key_file=None if share is None else share.key_file,
        )
        return (*python, *module, *arguments)

    def worker(index: int) -> ChildSpec:
        name, count = f"{prefix}worker-{index}", placement.max_workers
        environment = _worker_environment(placement, index)
        return ChildSpec(name, command(("workers",), name, index, count), _WORKERS, environment)

    def gateway(index: int) -> ChildSpec:
        name = f"{prefix}gateway-{index}"
        return ChildSpec(name, command(("actorserve", "gateway"), name, index, num_gateways), _GATEWAYS)

    last = _WORKERS if share is None else _COORDINATOR
    name = f"{prefix}coordinator"
    coordinator = ChildSpec(name, command(("actorserve", "coordinator"), name), last)
    workers = tuple(worker(index) for index in range(placement.max_workers))
    return SupervisionTree(
        children=(
            *((coordinator,) if share is None or share.has_coordinator else ()),
            *(gateway(index) for index in range(num_gateways)),
            *workers[: placement.num_workers],
        ),
        spare=workers[placement.num_workers :],
        limits=RestartLimits(rules.max_restarts, rules.window_s, rules.backoff_s, rules.max_backoff_s),
        drain_timeout_s=settings.http.lame_duck_s + settings.cluster.drain_timeout_s,
        num_draining_stages=last,
    )


def _worker_environment(placement: Placement, index: int) -> dict[str, str]:
    selectors = placement.selectors
    return {
        "CUDA_VISIBLE_DEVICES": selectors[index % len(selectors)] if selectors else "",
        # The numeric libraries read this when they load, before the worker could set it itself.
        "OMP_NUM_THREADS": str(placement.threads_per_worker),
    }
