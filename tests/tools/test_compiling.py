"""The optional build of the core and the simulator by mypyc."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.compiling import SWITCH, use_if_wanted
from tools.compiling.builds import ROOT, Finder, build_folder, compiled_sources

SMALL = ROOT / "config" / "simulations" / "speed.toml"
RUN = """
import json, sys
from tools.compiling import use_if_wanted
print(use_if_wanted())
from pathlib import Path
from tools.simulation.experiment import read_experiment
from tools.simulation.runner import run_once
changes = {"num_requests": 300, "cluster": {"instances": 4, "migration": {"enabled": True}, **json.loads(sys.argv[2])}}
changes |= {"priorities": {"0": 0.8, "1": 0.2}, "arrivals": {"rate_per_s": 12.0}}
changes |= {"failures": [{"process": "worker-1", "at_s": 9.0, "restart_at_s": 15.0}]}
experiment = read_experiment(Path(sys.argv[1]), changes)
print(json.dumps(run_once(experiment.cases[0], None, lambda share: None)))
"""


def run(switch: str, cluster: str) -> list[str]:
    """Whether compiled modules were used, and the figures of a run, in a process of its own."""
    environment = {**os.environ, SWITCH: switch}
    command = [sys.executable, "-c", RUN, str(SMALL), cluster]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def is_built() -> bool:
    folder = build_folder()
    return folder is not None and folder.is_dir()


@pytest.mark.skipif(not is_built(), reason="these sources are not compiled; tools/compile does that")
@pytest.mark.parametrize("cluster", ["{}", '{"kv_tokens": 20000, "max_context_tokens": 4000}', '{"noise": 0.1}'])
def test_compiled_and_interpreted_runs_give_the_same_bytes(cluster: str) -> None:
    """With migrations, a death, two classes, and with swaps or noise: every figure of a run is the same."""
    is_interpreted, interpreted = run("0", cluster)
    is_compiled, compiled = run("1", cluster)
    assert (is_interpreted, is_compiled) == ("False", "True")
    assert compiled == interpreted


def test_without_a_build_everything_is_interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If these sources were not compiled, asking for compiled modules changes nothing."""
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, Finder)])
    before = list(sys.meta_path)
    assert not use_if_wanted()
    assert sys.meta_path == before


def test_a_build_belongs_to_its_sources(tmp_path: Path) -> None:
    """Any change of the core or the simulator means another build, whether the changed file is compiled or not."""
    for folder in ("core", "sim"):
        shutil.copytree(ROOT / "actorserve" / folder, tmp_path / "actorserve" / folder)
    folders = {build_folder(tmp_path)}
    assert folders == {build_folder(ROOT)}
    for name in ("core/scheduling/mlfq.py", "core/messages/load.py", "sim/results.py"):
        with (tmp_path / "actorserve" / name).open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        folders.add(build_folder(tmp_path))
    assert len(folders) == 4


def test_the_vocabulary_is_not_compiled() -> None:
    """The wire reads the annotations of messages, effects and configs, which compiled classes do not have."""
    names = {str(file) for file in compiled_sources(ROOT)}
    assert {"actorserve/core/scheduling/mlfq.py", "actorserve/sim/simulation.py"} <= names
    vocabulary = ("core/messages/load.py", "core/effects.py", "core/instance/config.py", "core/timing/profile.py")
    assert not names & {f"actorserve/{name}" for name in vocabulary}
