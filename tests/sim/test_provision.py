"""``tools/simulate provision``: the smallest clusters that hold service levels at a load, and the best of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.sim.experiments import EXPERIMENT, write
from tools.simulation.__main__ import EXIT_UNUSABLE, main
from tools.simulation.machines import ROOT
from tools.simulation.provisioning.plan import read_provisioning
from tools.simulation.provisioning.search import Counts, Size, frontier, smallest_sizes

LEVELS = '[slo]\nreference = "llama-2-70b-a100"\n'
DESIGNS = """
[provision]
rate_per_s = 4.0
edge_seeds = [2, 3]
[[provision.designs]]
name = "a100"
label = "A100 alone"
groups = [{ name = "all", machine = "dgx-a100", high = 4 }]
[[provision.designs]]
name = "both"
groups = [{ name = "new", machine = "dgx-h100", high = 3 }, { name = "old", machine = "dgx-a100", high = 4 }]
"""
CLUSTER = EXPERIMENT[: EXPERIMENT.index("[search]")].replace(
    'profile = "tiny.toml"\nkv_tokens = 120\nhost_kv_tokens = 400\n', 'model = "llama-2-70b"\n'
)
FILE = CLUSTER.replace("max_context_tokens = 60", "max_context_tokens = 4000").replace("uniform:1:30", "100")
FILE = FILE.replace("max_batch_tokens = 50", "max_batch_tokens = 2048") + LEVELS + DESIGNS


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 12))
def test_the_walk_finds_every_smallest_size(falls: list[int], num_second: int) -> None:
    """Of two groups, exactly those sizes are found that hold the load and do not with one machine less of either."""
    needed = dict(enumerate(sorted(falls, reverse=True), start=1))
    first, second = list(needed), list(range(1, num_second + 1))
    asked: list[Counts] = []

    def is_held(counts: Counts) -> bool:
        asked.append(counts)
        return counts[1] >= needed[counts[0]]

    held = {(a, b) for a in first for b in second if b >= needed[a]}
    expected = {(a, b) for a, b in held if (a - 1, b) not in held and (a, b - 1) not in held}
    assert set(smallest_sizes([first, second], is_held)) == expected
    assert len(asked) <= len(first) + len(second) + 5


@pytest.mark.parametrize("needed", range(1, 12))
def test_the_fewest_machines_of_one_group_are_found(needed: int) -> None:
    """Of one group the fewest machines are found by bisection, in steps, and none if not even the most suffice."""
    found = smallest_sizes([[2, 4, 6, 8, 10]], lambda counts: counts[0] >= needed)
    assert found == ([] if needed > 10 else [(max(2, needed + needed % 2),)])


def test_the_frontier_is_what_no_other_beats() -> None:
    """A size stays if no other costs and draws as little; what only an unsure one beat comes in."""
    cheap, frugal, poor = (
        Size("a", (1,), 10.0, 500.0),
        Size("a", (2,), 20.0, 400.0),
        Size("b", (1,), 20.0, 450.0),
    )
    alike = Size("c", (9,), 10.0, 500.0)
    assert frontier([poor, frugal, cheap, alike]) == [cheap, alike, frugal]
    assert frontier([poor, frugal, cheap], lambda size: size != frugal) == [cheap, poor]
    assert frontier([]) == []


def test_provisioning_finds_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each design's smallest clusters are written with a plot and a table; equal searches give equal files."""
    file = write(tmp_path, FILE)
    for name in ("one", "two"):
        options = ["--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json"), "--processes", "2"]
        assert main(["provision", str(file), *options]) == 0
    one, two = ((tmp_path / name / "metrics.json").read_bytes() for name in ("one", "two"))
    assert one == two
    values = json.loads(one)
    held = {(tried["design"], *tried["counts"]): tried["held"] for tried in values["tried"] if tried["seed"] == 1}
    assert {size["design"] for size in values["sizes"]} == {"a100", "both"}
    for size in values["sizes"]:
        assert held[(size["design"], *size["counts"])]
    assert any(not is_held for is_held in held.values())
    (alone,) = (size for size in values["sizes"] if size["design"] == "a100")
    assert alone["cost_per_hour"] == pytest.approx(17.68 * alone["counts"][0])
    assert alone["watts"] == 3200.0 * alone["counts"][0]
    assert values["best"] in values["frontier"]
    assert values["best"]["cost_per_hour"] == min(size["cost_per_hour"] for size in values["frontier"])
    assert (tmp_path / "one" / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "4 requests/s" in json.loads((tmp_path / "one.json").read_text())["tables"][0]["title"]
    shown = capsys.readouterr()
    assert "A100 alone" in shown.out
    assert "best" in shown.out
    assert "a100 with 4 machines, seed 1: held" in shown.err


def test_the_least_may_be_power(tmp_path: Path) -> None:
    """``least = "watts"`` makes the size of least power the best."""
    file = write(tmp_path, FILE.replace("rate_per_s = 4.0", 'rate_per_s = 4.0\nleast = "watts"'))
    assert main(["provision", str(file), "--out", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "metrics.json").read_text())
    assert values["best"]["watts"] == min(size["watts"] for size in values["frontier"])


def test_a_load_that_no_size_holds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If no design holds the load there is no best one, and the table says so of each design."""
    file = write(tmp_path, FILE)
    limits = ["--set", "slo.ttft=[1e-3,1e-3,1e-3]"]
    assert main(["provision", str(file), "--out", str(tmp_path), *limits]) == 0
    assert capsys.readouterr().out.count("none of these sizes") == 2
    assert json.loads((tmp_path / "metrics.json").read_text())["best"] is None


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (LEVELS, "", "slo is missing: expected the service levels"),
        (DESIGNS, "", "provision is missing: expected a table with rate_per_s and designs"),
        ('name = "both"', 'name = "a100"', "provision: designs.1.name is 'a100': expected another name"),
        ("high = 4", "low = 5, high = 4", "provision: designs.0.groups.0.high is 4: expected at least low"),
        ('"dgx-a100", high = 4', '"tpu", high = 4', "cluster.groups.0.machine is 'tpu': expected one of dgx-a100"),
        ("[slo]", "[[arms]]\nname = 'x'\n[slo]", "arms is not expected together with provision"),
        ("edge_seeds", "edge_seed", "provision: edge_seed is unknown: expected designs"),
    ],
)
def test_a_wrong_plan_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], was: str, now: str, told: str
) -> None:
    """An error in the file is one line that names the key, before any run."""
    assert was in FILE
    assert main(["provision", str(write(tmp_path, FILE.replace(was, now, 1))), "--out", str(tmp_path)]) == EXIT_UNUSABLE
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.parametrize(
    "file", sorted((ROOT / "config" / "simulations" / "provisioning").glob("*.toml")), ids=lambda file: file.stem
)
def test_shipped_plans_are_right(file: Path) -> None:
    """Every plan that is shipped can be read, and its machines have a cost and a power."""
    for design in read_provisioning(file, {}).designs:
        counts = [group.high for group in design.table.groups]
        assert design.cost_per_hour(counts) > 0
        assert design.watts(counts) > 0
