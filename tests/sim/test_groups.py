"""Clusters of several groups of instances: which instances start, where requests go, and what machines cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorserve.errors import SimulationError
from actorserve.sim.config import parse_run
from actorserve.sim.results import Results
from actorserve.sim.simulated_process import Process
from actorserve.sim.simulation import Simulation
from tests.sim.profiles import PROFILE
from tests.sim.runs import BASE, run
from tools.simulation.experiment import merged, read_experiment

SMALL: dict[str, Any] = {"name": "small", "count": 2, "profile": "sums", "kv_tokens": 80}
LARGE: dict[str, Any] = {"name": "large", "count": 1, "profile": "sums", "kv_tokens": 400}


def grouped(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The values of the base run with these groups in place of equal instances."""
    cluster = {key: value for key, value in BASE["cluster"].items() if key not in ("profile", "kv_tokens")}
    return merged({**BASE, "cluster": {**cluster, "groups": list(groups)}}, changes)


def simulation(values: dict[str, Any]) -> Simulation:
    config = parse_run(values, "test")
    return Simulation(config, [replace(PROFILE, name=group.profile) for group in config.cluster.all_groups])


class Watched(Simulation):
    """Remembers the memory of each worker that was started, in blocks, and what it computed last."""

    def __init__(self, values: dict[str, Any]) -> None:
        config = parse_run(values, "test")
        super().__init__(config, [PROFILE] * len(config.cluster.all_groups))
        self.sizes: dict[str, int] = {}
        self.roles: dict[str, str] = {}  # the last role of each worker

    def _end(self, process: Process, notice_s: float) -> None:
        super()._end(process, notice_s)
        self._note_role(process)

    def run(self) -> Results:
        results = super().run()
        for process in self.processes.values():
            self._note_role(process)
        return results

    def _note_role(self, process: Process) -> None:
        if process.engine is not None:
            self.roles[process.peer.name] = process.worker_core.role.value

    def _start(self, name: str) -> None:
        super()._start(name)
        if name.startswith("worker"):
            self.sizes[name] = self.processes[name].worker_core.memory.device.num_blocks


def test_one_group_is_what_is_written_without_groups() -> None:
    """A cluster of one group gives the same results as the same instances written without groups."""
    alike = run({"num_requests": 30, "cluster": {"instances": 2, "kv_tokens": 80}}).figures()
    assert simulation(grouped({**SMALL, "name": "all"}, num_requests=30)).run().figures() == alike
    assert alike["requests"]["completed"] == 30


def test_workers_are_numbered_group_by_group() -> None:
    """Each instance has its own group's memory, and its kind tells whether its profile is another one."""
    other = {**LARGE, "profile": "other"}
    made = simulation(grouped(SMALL, other))
    made.run()
    instances = [made.processes[f"worker-{number}"].worker_core for number in range(3)]
    assert [instance.memory.device.num_blocks for instance in instances] == [20, 20, 100]
    gateway = made.processes["gateway-0"]
    kinds = {peer.name: up.worker.kind for peer, up in gateway.met.items() if up.worker is not None}
    assert kinds == {"worker-0": "simulated sums", "worker-1": "simulated sums", "worker-2": "simulated other"}


@pytest.mark.parametrize("dispatch", ["freeness", "shortest_queue", "least_loaded", "round_robin"])
def test_long_requests_go_to_instances_that_can_hold_them(dispatch: str) -> None:
    """Requests that fit only the large instance are all served there, whatever the rule."""
    values = grouped(SMALL, LARGE, num_requests=12, cluster={"dispatch": dispatch}, lengths={"prompt": 90, "output": 9})
    made = simulation(values)
    assert made.run().figures()["requests"]["completed"] == 12
    rows = [made.processes[f"worker-{number}"].worker_engine.num_rows for number in range(3)]
    assert rows[:2] == [0, 0]
    assert rows[2] > 0


def test_freeness_gives_a_larger_instance_more_requests() -> None:
    """An instance with five times the memory has more iterations left with the same batch, so it gets more requests."""
    made = simulation(grouped(SMALL, LARGE, num_requests=60, arrivals={"rate_per_s": 2.0}))
    made.run()
    rows = [made.processes[f"worker-{number}"].worker_engine.num_rows for number in range(3)]
    assert rows[2] > 2 * max(rows[:2])


def test_scaling_starts_instances_of_the_named_group() -> None:
    """A worker that was ordered has the memory of the group that ``scaling.group`` names."""
    scaling = {"group": "large", "max_workers": 5, "min_workers": 3, "warm_up_s": 1.0, "hold_s": 0.5}
    values = grouped(LARGE, SMALL, num_requests=200, cluster={"scaling": scaling}, arrivals={"rate_per_s": 5.0})
    made = Watched(values)
    made.run()
    assert made.sizes["worker-3"] == 100


@pytest.mark.parametrize(("group", "num_blocks"), [(None, 20), ("large", 100)])
def test_scaling_starts_instances_for_the_pool_that_is_short(group: str | None, num_blocks: int) -> None:
    """Long prompts with short answers press the prompt pool. The worker that is ordered is one of that pool's machines,
    unless a group is named, and it computes prompts whatever its group does.
    """
    scaling = {"group": group, "max_workers": 3, "min_workers": 2, "warm_up_s": 1.0, "hold_s": 1.0}
    values = grouped(
        {**SMALL, "count": 1, "role": "prompt"},
        {**LARGE, "role": "token"},
        num_requests=100,
        cluster={"scaling": scaling, "round_s": 0.25},
        arrivals={"rate_per_s": 1.2 / PROFILE.prefill(60)},
        lengths={"prompt": 60, "output": 2},
    )
    made = Watched(values)
    prompts = made.run().figures()
    assert prompts["requests"]["completed"] == 100
    assert made.sizes["worker-2"] == num_blocks
    assert made.roles["worker-2"] == "prompt"


def test_machines_cost_their_lifetimes() -> None:
    """The cost is each group's hours times its price, and the power is the sum of the machines'; unknown without."""
    small, large = {**SMALL, "cost_per_hour": 36.0, "watts": 10.0}, {**LARGE, "cost_per_hour": 360.0, "watts": 100.0}
    results = simulation(grouped(small, large)).run()
    ended_s = results.outcomes.ended_s[0]
    figures = results.figures()["instances"]
    assert figures["cost"] == pytest.approx((2 * 0.01 + 0.1) * ended_s)
    assert figures["mean_watts"] == pytest.approx(120.0)
    unknown = simulation(grouped(SMALL)).run().figures()["instances"]
    assert (unknown["cost"], unknown["mean_watts"]) == (None, None)


@pytest.mark.parametrize(
    ("groups", "changes", "told"),
    [
        ([], {}, "cluster.groups is empty: expected at least one"),
        ([{**SMALL, "count": 0}], {}, "cluster.groups.0.count is 0: expected at least 1"),
        ([{**SMALL, "role": "p"}], {}, "cluster.groups.0.role is 'p': expected 'mixed', 'prompt' or 'token'"),
        ([{**SMALL, "kv_tokens": 3}], {}, "cluster.groups.0.kv_tokens is 3: expected at least a block of 4"),
        ([SMALL, SMALL], {}, "cluster.groups.1.name is 'small': expected another name than those before it"),
        ([SMALL], {"profile": "sums"}, "cluster.profile is not expected together with groups"),
        ([{**SMALL, "machines": 3}], {}, "cluster.groups.0.machines is unknown: expected cap, cost_per_hour, c"),
        ([SMALL, LARGE], {"scaling": {"max_workers": 4}}, "cluster.scaling.group is missing: expected one of small, "),
        (
            [SMALL, LARGE],
            {"scaling": {"group": "large"}},
            "cluster.scaling.group is 'large': expected only with scaling.max_workers",
        ),
        ([SMALL], {"scaling": {"group": "x"}}, "cluster.scaling.group is 'x': expected one of small"),
        ([SMALL, {**LARGE, "watts": 1.0}], {}, "cluster.groups.0.watts is missing: expected it in all groups, or in"),
        ([{**SMALL, "watts": -1.0}], {}, "cluster.groups.0.watts is -1.0: expected at least 0"),
    ],
)
def test_wrong_groups_are_named(groups: list[dict[str, Any]], changes: dict[str, Any], told: str) -> None:
    """An error names the group's place, the key, and what was expected."""
    with pytest.raises(SimulationError) as caught:
        parse_run(grouped(*groups, cluster=changes), "test")
    assert str(caught.value).startswith(f"test: {told}")


def test_groups_have_profiles_of_one_model(tmp_path: Path) -> None:
    """A cluster serves one model, so a profile of another model is refused."""
    file = tmp_path / "two.toml"
    groups = "".join(
        f'[[cluster.groups]]\nname = "{name}"\ncount = 1\nprofile = "{profile}"\nkv_tokens = 1000\n'
        for name, profile in (("a", "bloom-176b-h100"), ("b", "llama-2-70b-h100"))
    )
    lengths = "[lengths]\nprompt = 5\noutput = 2\n[arrivals]\nrate_per_s = 1.0\n"
    file.write_text(f"num_requests = 2\n[cluster]\nmax_context_tokens = 100\n{groups}{lengths}", encoding="utf-8")
    with pytest.raises(SimulationError, match=r"cluster\.groups\.1\.profile is of llama-2-70b with .* in the first"):
        read_experiment(file, {})
