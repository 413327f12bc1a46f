"""The bootstrap behind tools/* as a user runs it, offline, in a small repository with packages of its own."""

import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools._setup import NO_COMPILER, absolute_paths
from tools.compiling.__main__ import EXIT_NO_COMPILER

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
INSTALLING = "installing dependencies"


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A package of one module that has a VERSION, and prints its arguments when it is run."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"import sys\nVERSION = {version!r}\nif __name__ == '__main__': print(*sys.argv[1:])\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


class Repository:
    """A repository with our tools, whose server prints its arguments and the version of its dependency."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
        (root / "tools" / "compiling" / "__init__.py").write_text("", encoding="utf-8")
        (root / "tools" / "compiling" / "__main__.py").write_text(
            "import os, sys\nsys.exit(int(os.environ.get('BUILD', '0')))\n", encoding="utf-8"
        )
        for folder in ("config", "actorserve", "wheels", "elsewhere"):
            (root / folder).mkdir()
        for version in ("1.0", "2.0"):
            make_wheel(root / "wheels", "tiny", version)
        make_wheel(root / "wheels", "pytest", "1.0")
        self.pin("tiny==1.0\npytest==1.0\n")
        (root / "pyproject.toml").write_text(
            '[project]\ndependencies = ["tiny>=1"]\n[project.optional-dependencies]\ntest = ["pytest"]\n',
            encoding="utf-8",
        )
        (root / "actorserve" / "__init__.py").touch()
        (root / "actorserve" / "__main__.py").write_text(
            "import sys, tiny\nprint(tiny.VERSION, *sys.argv[1:])\n", encoding="utf-8"
        )

    def pin(self, text: str) -> None:
        (self.root / "config" / "constraints.txt").write_text(text, encoding="utf-8")

    def start(self, tool: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        ours |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.root / "wheels")}
        return subprocess.Popen(
            [str(self.root / "tools" / tool), *arguments],
            cwd=self.root / "elsewhere",
            env=ours | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, tool: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        process = self.start(tool, *arguments, **environment)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out.strip(), err.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository in which two servers were started at once, when nothing was installed."""
    repository = Repository(tmp_path_factory.mktemp("repository"))
    started = [repository.start("serve", "--port", str(port)) for port in (1, 2)]
    ended = [process.communicate(timeout=DEADLINE_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert [out for out, _ in ended] == ["1.0 serve --port 1\n", "1.0 serve --port 2\n"]
    # One server's start installs, and the other waits for it.
    assert sum(err.count(INSTALLING) for _, err in ended) == 1
    return repository


def test_a_second_start_installs_nothing(installed: Repository) -> None:
    """Once installed, a tool runs its command from any folder, and prints nothing of its own."""
    assert installed.run("serve", "--help") == (0, "1.0 serve --help", "")


def test_the_callers_files_are_not_imported(installed: Repository) -> None:
    """A file in the caller's folder with a module's name does not replace the module."""
    (installed.root / "elsewhere" / "tiny.py").write_text("VERSION = 'the wrong one'\n", encoding="utf-8")
    assert installed.run("serve") == (0, "1.0 serve", "")


def test_the_program_is_in_the_environment(installed: Repository) -> None:
    """``.venv/bin/actorserve`` runs the program from any folder. Without it an installation is not complete."""
    program = installed.root / ".venv" / "bin" / "actorserve"
    done = subprocess.run([str(program), "serve", "x y"], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "1.0 serve x y"
    program.unlink()
    assert INSTALLING in installed.run("serve")[2]
    assert program.exists()


def test_an_interrupted_installation_is_done_again(installed: Repository) -> None:
    """Without the stamp that is written last, an installation is not trusted, and is completed."""
    (installed.root / ".venv" / "actorserve-runtime.stamp").unlink()
    code, out, err = installed.run("serve")
    assert (code, out) == (0, "1.0 serve")
    assert INSTALLING in err


def test_changed_pins_are_installed(installed: Repository) -> None:
    """When the pins change, the next start installs the new versions."""
    installed.pin("tiny==2.0\npytest==1.0\n")
    try:
        code, out, err = installed.run("serve")
        assert (code, out) == (0, "2.0 serve")
        assert INSTALLING in err
    finally:
        installed.pin("tiny==1.0\npytest==1.0\n")
    assert installed.run("serve")[1] == "1.0 serve"


def test_a_broken_environment_is_made_anew(installed: Repository) -> None:
    """A .venv whose Python is gone, as after a distribution's upgrade, is made again."""
    (installed.root / ".venv" / "bin" / "python").unlink()
    code, out, err = installed.run("serve")
    assert (code, out) == (0, "1.0 serve")
    assert "making .venv" in err


def test_the_test_set_is_installed_for_tests_alone(installed: Repository) -> None:
    """tools/serve does not install packages that only tests need; tools/test does."""
    (site_packages,) = (installed.root / ".venv" / "lib").glob("python*/site-packages")
    (installed.root / ".venv" / "actorserve-test.stamp").unlink(missing_ok=True)
    assert not (site_packages / "pytest.py").exists()
    installed.run("test")
    assert (site_packages / "pytest.py").exists()
    assert installed.run("serve") == (0, "1.0 serve", "")


def test_all_tests_run_in_two_parts_and_once_more_compiled(installed: Repository) -> None:
    """Without arguments, tools/test runs all tests in two parts, and the core's tests again on the compiled core; with
    arguments, pytest gets only these.
    """
    code, out, _ = installed.run("test")
    serial, parallel, compiled = out.splitlines()
    assert (code, serial) == (0, "-m serial and not compiled")
    assert re.fullmatch(r"-m not serial -n \d+ --dist worksteal", parallel)
    assert compiled.startswith("tests/core tests/tools/test_compiling.py ")
    assert installed.run("test", "-k", "x") == (0, "-k x", "")


def test_without_a_compiler_the_compiled_tests_are_skipped_aloud(installed: Repository) -> None:
    """A machine that cannot compile says what it skips, and passes; a build that fails is a failure."""
    assert NO_COMPILER == EXIT_NO_COMPILER
    code, out, err = installed.run("test", BUILD=str(NO_COMPILER))
    assert (code, len(out.splitlines())) == (0, 2)
    assert "SKIPPED: the core's tests on the compiled core, because this machine has no C compiler" in err
    code, out, _ = installed.run("test", BUILD="1")
    assert (code, len(out.splitlines())) == (1, 2)


def test_a_failed_installation_is_reported(installed: Repository) -> None:
    """An unavailable version ends with pip's reason and one line of ours, and the next start tries again."""
    installed.pin("tiny==9.9\npytest==1.0\n")
    try:
        for _ in range(2):
            code, out, err = installed.run("serve")
            assert (code, out) == (1, "")
            assert "Traceback" not in err
            assert err.splitlines()[-1].startswith("actorserve: installing failed")
    finally:
        installed.pin("tiny==1.0\npytest==1.0\n")
    assert installed.run("serve")[0] == 0


def test_a_missing_venv_module_is_reported(tmp_path: Path) -> None:
    """Without ensurepip, as on a bare Debian, one line names the package to install."""
    (tmp_path / "repository").mkdir()
    repository = Repository(tmp_path / "repository")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ensurepip.py").write_text("raise ImportError\n", encoding="utf-8")
    code, out, err = repository.run("serve", PYTHONPATH=str(tmp_path / "broken"))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"actorserve: .* apt install python3\.\d+-venv", err)


@pytest.mark.parametrize("has_python", [True, False])
def test_an_old_python_is_reported(tmp_path: Path, has_python: bool) -> None:
    """If no Python is new enough, one line says which is needed and which is installed."""
    for tool in ("readlink", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    if has_python:
        old = tmp_path / "python3"
        old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.10\nexit 1\n', encoding="utf-8")
        old.chmod(0o755)
    command = [str(ROOT / "tools" / "serve")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    there = "python3 here is Python 3.8.10" if has_python else "there is no python3 here"
    assert done.returncode == 1
    assert done.stderr == f"actorserve: needs Python 3.11 or newer; {there}\n"


def pins() -> dict[str, Version]:
    lines = (ROOT / "config" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*]+", str(requirement.specifier)) for requirement in wanted)
    return {canonicalize_name(requirement.name): Version(str(requirement.specifier)[2:]) for requirement in wanted}


def test_everything_that_is_needed_is_pinned() -> None:
    """Every package that pyproject.toml needs, directly or through others, has an exact version that fits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins()
    waiting = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["test"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        assert name in pinned, f"{wanted} is not pinned"
        assert wanted.specifier.contains(pinned[name]), f"{wanted} does not allow {pinned[name]}"
        try:
            asked = distribution(wanted.name).requires or []
        except PackageNotFoundError:  # torch's companions differ from build to build
            continue
        extras = [*wanted.extras, ""]
        for requirement in map(Requirement, asked):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(requirement)


def test_the_torch_for_older_drivers_is_the_pinned_one() -> None:
    """The operations page names the build for CUDA 12 of the version of torch that is pinned."""
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "config" / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert f"'torch=={pinned}+cu126'" in (ROOT / "config" / "README.md").read_text("utf-8")


def test_no_registry_is_named() -> None:
    """The machine's configuration chooses where packages come from: no tool names a registry's address."""
    for file in [*(ROOT / "tools").glob("_*"), ROOT / "config" / "constraints.txt", ROOT / "pyproject.toml"]:
        if file.is_file():
            assert "://" not in file.read_text(encoding="utf-8"), file


def test_the_tools_are_executable() -> None:
    """Every file in tools that a person runs is executable."""
    for name in ("serve", "test", "check", "bench", "gpu-first-hour", "_python"):
        assert os.access(ROOT / "tools" / name, os.X_OK), name


def test_paths_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path given to tools/test is relative to the caller's folder, if it exists there."""

    (tmp_path / "test_x.py").touch()
    monkeypatch.chdir(tmp_path)
    given = ["-k", "x", "test_x.py::test_y", "tests/core"]
    assert absolute_paths(given, ROOT) == ["-k", "x", f"{tmp_path}/test_x.py::test_y", "tests/core"]
    monkeypatch.chdir(ROOT)
    assert absolute_paths(given, ROOT) == given
