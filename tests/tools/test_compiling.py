"""The optional build of the core and the simulator by mypyc."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.compiling import SWITCH, __main__ as program, use_if_wanted
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


@pytest.mark.compiled
@pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"needs a build by tools/compile, and {SWITCH}=1")
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


def whole_lists(tree: ast.Module) -> list[str]:
    """The generator expressions whose reader may stop early, and of which mypyc makes whole lists nevertheless."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        read_by_next = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "next"}
        for node in nodes:
            match node:
                case ast.Return(value=ast.GeneratorExp()):
                    found.append(f"line {node.lineno}: {function.name}")
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.GeneratorExp()) if name in read_by_next:
                    found.append(f"line {node.lineno}: {function.name}")
    return found


@pytest.mark.parametrize("file", [str(file) for file in compiled_sources(ROOT)])
def test_compiled_code_is_as_lazy_as_interpreted_code(file: str) -> None:
    """A search that mostly ends early is a generator function or stands in ``next()``, which mypyc keeps lazy."""
    assert whole_lists(ast.parse((ROOT / file).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "body", ["return (x for x in range(n))", "found = (x for x in range(n)); return next(found, None)"]
)
def test_a_generator_expression_that_becomes_a_list_is_found(body: str) -> None:
    """The rule above finds a generator expression that is returned, or that is named before its ``next()``."""
    assert whole_lists(ast.parse(f"def search(n):\n    {body}")) == ["line 2: search"]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that would build, in place of builds that take minutes."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "not built by this test")

    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_help_builds_nothing(builds: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """The tool tells what it does, and refuses arguments that it does not have, before any build."""
    for arguments, status in ((["--help"], 0), (["--fast"], 2)):
        with pytest.raises(SystemExit) as caught:
            program.main(arguments)
        assert caught.value.code == status
    assert "usage: tools/compile" in capsys.readouterr().out
    assert not builds


def test_a_compiler_may_have_arguments(
    builds: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CC is a command, of which only the program must exist; a program that does not is named."""
    monkeypatch.setenv("CC", f"'{sys.executable}' gcc")
    assert program.main([]) == 1
    assert capsys.readouterr().err == "compile: not built by this test\n"
    assert len(builds) == 1
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    assert program.main([]) == program.EXIT_NO_COMPILER
    assert "there is no C compiler no-such-compiler: install gcc" in capsys.readouterr().err
    assert len(builds) == 1


def test_an_interrupted_build_is_one_line(
    builds: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C ends a build with one line, and leaves no half of it."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(subprocess, "run", interrupt)
    assert program.main([]) == program.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "compile: interrupted; nothing is built\n"
    assert not [file for file in (tmp_path / "compiled").iterdir() if file.is_dir()]
