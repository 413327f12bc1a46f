"""The machines of a simulated cluster: which group each worker's is of, what iterations on it take, and its power."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from actorserve.core.messages import InstanceRole, ModelInfo, Peer, PowerReport, SetPowerCaps, WorkerInfo
from actorserve.core.timing.profile import Profile
from actorserve.sim.cluster_table import GroupTable, slowed
from actorserve.sim.config import RunConfig
from actorserve.sim.engine_model import EngineModel
from actorserve.sim.measures.occupancy import Occupancy
from actorserve.sim.power.actuator import power_report
from actorserve.sim.power.machine_power import MachineEnergy, MachinePower
from actorserve.sim.simulated_process import Process
from actorserve.sim.step_costs import StepCosts, step_costs


class Machines:
    """What a run knows of its machines, and what they did while requests arrived."""

    def __init__(self, config: RunConfig, profiles: Sequence[Profile]) -> None:
        """``profiles``: of the cluster's groups, in their order."""
        cluster = self._cluster = config.cluster
        groups = cluster.all_groups
        self._profiles = {
            group: cluster.links.applied_to(group.slowed(profile))
            for group, profile in zip(groups, profiles, strict=True)
        }
        self._workers = {
            group: WorkerInfo(
                f"simulated {profile.name}",
                ModelInfo(profile.model, 2**31, cluster.max_tokens_of(group)),
                profile.speed(),
            )
            for group, profile in self._profiles.items()
        }
        self._until_s = config.duration_s or inf  # when the last request arrives
        self._seed = config.seed
        self._num_workers = cluster.num_workers  # all workers that were ever started or ordered
        self._newcomers: dict[str, GroupTable] = {}  # the group of each worker that was ordered
        self._last_caps = 0  # the number of the last SetPowerCaps
        self.lifetimes_s = dict.fromkeys(groups, 0.0)
        self.occupancies = {group: Occupancy(self._until_s) for group in groups}
        self.energies = {group: MachineEnergy() for group in groups if cluster.power.curves is not None}

    def order(self, role: InstanceRole | None) -> str:
        """Order a worker for this role. Returns its name."""
        name = f"worker-{self._num_workers}"
        self._num_workers += 1
        self._newcomers[name] = self._cluster.scaled_group(role)
        return name

    def group_of(self, worker: str) -> GroupTable:
        newcomers = self._newcomers.get(worker)
        return newcomers or self._cluster.group_of(int(worker.removeprefix("worker-")))

    def info_of(self, worker: str) -> WorkerInfo:
        """What the worker says of itself."""
        return self._workers[self.group_of(worker)]

    def profile_of(self, worker: str) -> Profile:
        """The times that the worker knows."""
        return self._profiles[self.group_of(worker)]

    def engine(self, peer: Peer, make: Callable[..., EngineModel], born_s: float) -> EngineModel:
        """The engine of a worker that starts now, whose machine has run since ``born_s``. ``make`` gets what
        ``EngineModel`` gets.
        """
        cluster, group = self._cluster, self.group_of(peer.name)
        profile, power = self._profiles[group], None
        if cluster.power.curves is not None:
            cap = 1.0 if group.cap is None else group.cap
            power = MachinePower(cluster.power, group.watts or 0.0, cap, born_s, self._until_s)
        return make(
            profile,
            cluster.tokens_per_block * profile.kv_bytes_per_token,
            random.Random(f"{self._seed} {peer.name} {peer.incarnation}"),
            costs=self._costs(group, power),
            pause_s=cluster.step_overhead_s,
            copy_slowdown=cluster.copy_slowdown,
            noise=cluster.noise,
            run_ahead=cluster.run_ahead,
            occupancy=Occupancy(self._until_s),
            power=power,
        )

    def _costs(self, group: GroupTable, power: MachinePower | None) -> StepCosts:
        """Of iterations on a machine of this group, under its power cap."""
        profile = self._profiles[group]
        if power is not None:
            profile = slowed(profile, power.prefill_factor, power.decode_factor)
        return step_costs(profile, group.profile, self._cluster.costs)

    def count(self, process: Process, until_s: float) -> None:
        """Add what a worker's machine did in its life."""
        group, engine = self.group_of(process.peer.name), process.worker_engine
        self.lifetimes_s[group] += max(0.0, until_s - process.born_s)
        engine.occupancy.live(process.born_s, until_s)
        self.occupancies[group].merge(engine.occupancy)
        if engine.power is not None:
            self.energies[group].add(engine.power.end(until_s))

    # --- power caps --------------------------------------------------------------------------------------------------

    def read(self, processes: Mapping[str, Process]) -> PowerReport:
        """What the actuator reads now."""
        engines = [(name, process.engine) for name, process in processes.items()]
        powers = [(name, engine.power) for name, engine in engines if engine is not None and engine.power is not None]
        return power_report(self._last_caps, powers, self._cluster.power.least_cap)

    def capped(self, message: SetPowerCaps, processes: Mapping[str, Process]) -> Iterator[tuple[Process, float]]:
        """The workers whose machines the actuator is to cap, and the caps in watts."""
        self._last_caps = message.sequence
        for device, watts in zip(message.devices, message.caps_watts, strict=True):
            if (process := processes.get(device)) is not None:
                yield process, watts

    def set_cap(self, process: Process, cap_watts: float, now: float) -> None:
        """Iterations that begin from now on run under this cap."""
        engine = process.worker_engine
        if engine.power is not None:
            engine.power.set_cap(cap_watts / engine.power.full_watts, now)
            engine.set_costs(self._costs(self.group_of(process.peer.name), engine.power))
