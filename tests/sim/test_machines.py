"""Machine types: groups that name one get its profile, memory, cost and power."""

from pathlib import Path
from typing import Any

import pytest

from actorserve.errors import SimulationError
from actorserve.sim.cluster_table import GroupTable
from actorserve.sim.config import parse_run
from actorserve.sim.simulation import Simulation
from tests.sim.experiments import EXPERIMENT, write
from tests.sim.profiles import PROFILE
from tests.sim.runs import BASE, run
from tools.simulation.experiment import read_experiment
from tools.simulation.machines import Machines, MachinesTable, read_machines

CLUSTER: dict[str, Any] = {
    "model": "bloom-176b",
    "groups": [
        {"name": "one", "count": 25, "machine": "dgx-h100"},
        {"name": "two", "count": 21, "machine": "dgx-h100-capped", "kv_tokens": 5, "host_kv_tokens": 7},
        {"name": "three", "count": 1, "profile": "bloom-176b-a100", "kv_tokens": 9},
    ],
}


def test_a_machine_completes_its_group() -> None:
    """The group gets what the machine has, keys of its own stay, and other groups are left as they are."""
    completed = read_machines().completed(CLUSTER, "test")
    one, two, three = completed["groups"]
    assert one == {
        "name": "one",
        "count": 25,
        "profile": "bloom-176b-h100",
        "kv_tokens": (8 * 80 * 2**30 - 352 * 10**9) // 4_014_080,
        "cost_per_hour": 38.08,
        "watts": 5600.0,
    }
    assert (two["profile"], two["kv_tokens"], two["host_kv_tokens"]) == ("bloom-176b-h100-capped", 5, 7)
    assert three == CLUSTER["groups"][2]
    assert "model" not in completed


def test_shipped_machines_keep_the_stated_ratios() -> None:
    """An H100 machine costs 4.76 : 2.21 of an A100 machine, is given 1.75 times its power, and capped 70 % of that."""
    machines = read_machines().known.machines
    a100, h100, capped = (machines[name] for name in ("dgx-a100", "dgx-h100", "dgx-h100-capped"))
    assert h100.cost_per_hour / a100.cost_per_hour == pytest.approx(4.76 / 2.21)
    assert h100.watts / a100.watts == pytest.approx(1.75)
    assert capped.watts / h100.watts == pytest.approx(0.7)
    assert capped.cost_per_hour == h100.cost_per_hour


@pytest.mark.parametrize(
    "cluster", [{}, {"groups": 5}, {"groups": [5]}, {"groups": [5, {}]}, {"model": "gpt", "profile": "sums"}]
)
def test_other_clusters_stay_as_they_are(cluster: dict[str, Any]) -> None:
    """A cluster without machines is left for the reader of the file, which tells what is wrong with it."""
    assert read_machines().completed(cluster, "test") == cluster


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": None}, "test: cluster.model is missing: expected one of bloom-176b, llama-2-70b"),
        ({"model": "gpt"}, "test: cluster.model is 'gpt': expected one of bloom-176b"),
        ({"groups": [{"machine": "tpu"}]}, "test: cluster.groups.0.machine is 'tpu': expected one of dgx-a100"),
        ({"groups": [{"machine": 3}]}, "test: cluster.groups.0.machine is '3': expected one of dgx-a100"),
    ],
)
def test_an_unknown_machine_is_told(changes: dict[str, Any], told: str) -> None:
    """A machine or a model that is not in the file gives one line that names the key and the known ones."""
    with pytest.raises(SimulationError) as error:
        read_machines().completed(CLUSTER | changes, "test")
    assert str(error.value).startswith(told)


def test_a_cap_lengthens_prompts() -> None:
    """A machine's factors come with it to its group, whose prompts and decodes then take so many times as long."""
    machines = read_machines()
    group = {"name": "a", "count": 1, "machine": "dgx-h100-cap-75"}
    (completed,) = machines.completed({"model": "bloom-176b", "groups": [group]}, "test")["groups"]
    assert completed["prefill_factor"] == machines.known.machines["dgx-h100-cap-75"].prefill_factor > 1.0
    assert "decode_factor" not in completed
    plain = {"name": "a", "count": 1, "profile": "sums", "kv_tokens": 400}
    slow = GroupTable.model_validate(plain | {"prefill_factor": 1.5, "decode_factor": 2.0})
    assert GroupTable.model_validate(plain).slowed(PROFILE) is PROFILE
    slowed = slow.slowed(PROFILE)
    for chunks in ([(11, 0)], [(5, 40), (3, 0)]):
        assert slowed.step_s(chunks, 0, 0) == pytest.approx(1.5 * PROFILE.step_s(chunks, 0, 0))
    assert slowed.decode_s(4, 100) == 2.0 * PROFILE.decode_s(4, 100)
    cluster = {key: value for key, value in BASE["cluster"].items() if key not in ("profile", "kv_tokens")}
    values = {**BASE, "cluster": {**cluster, "groups": [plain | {"prefill_factor": 1.5}]}}
    first_s = Simulation(parse_run(values, "test"), [PROFILE]).run().outcomes.first_token_s[0]
    assert first_s == pytest.approx(run().outcomes.first_token_s[0] + 1.0)


def test_a_model_must_fit() -> None:
    """A machine whose memory does not hold the model's weights and a token is refused."""
    shipped = read_machines().known.model_dump()
    shipped["models"]["bloom-176b"]["weights_bytes"] = 8 * 80 * 2**30
    with pytest.raises(SimulationError, match="expected a machine whose memory holds more than bloom-176b"):
        Machines(MachinesTable.model_validate(shipped)).completed(CLUSTER, "test")


def test_a_wrong_file_of_machines_is_told(tmp_path: Path) -> None:
    """A file that is missing, is not TOML, or lacks a key gives an error that names it."""
    file = tmp_path / "machines.toml"
    with pytest.raises(SimulationError, match="cannot read"):
        read_machines(file)
    file.write_text("[machines")
    with pytest.raises(SimulationError, match=r"machines\.toml: not TOML"):
        read_machines(file)
    file.write_text("machines = {a = {profile = 'a', memory_bytes = 1, watts = 1.0}}\nmodels = {}")
    with pytest.raises(SimulationError, match="machines"):
        read_machines(file)


def test_an_experiment_may_name_machines(tmp_path: Path) -> None:
    """A file's arms may differ in their machines, and its runs know what the machines cost."""
    text = EXPERIMENT.replace(
        'profile = "tiny.toml"\nkv_tokens = 120\nhost_kv_tokens = 400\n', 'model = "llama-2-70b"\n'
    )
    for policy, machine in (("fcfs", "dgx-a100"), ("srpt", "dgx-h100")):
        arm = f'cluster.policy = "{policy}"\n'
        groups = f'cluster.groups = [{{name = "all", count = 2, machine = "{machine}"}}]\n'
        text = text.replace(f"{arm}[[arms]]", f"{arm}{groups}[[arms]]") if policy == "fcfs" else text + groups
    a100, h100 = read_experiment(write(tmp_path, text), {}).cases
    assert [profile.name for profile in a100.profiles] == ["Llama-2-70B on 8 NVIDIA A100 80GB"]
    assert [group.watts for group in h100.config.cluster.all_groups] == [5600.0]
