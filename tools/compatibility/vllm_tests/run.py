"""Runs vLLM's tests of its OpenAI server from a checkout that the user names."""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import actorserve
from tools.compatibility.default_model import write_tokenizer
from tools.compatibility.environments import ROOT, PythonEnvironment
from tools.compatibility.errors import CompatibilityError
from tools.compatibility.reports import Check, read_report

ENVIRONMENT: Final = PythonEnvironment("vllm-tests")
TESTS: Final = Path("tests")
FOLDERS: Final = (Path("entrypoints"), Path("tool_use"))
TABLE: Final = Path(__file__).parent / "skipped.toml"
TEST_TIMEOUT_S: Final = 300
SERVER: Final = "RemoteOpenAIServer"


def run_vllm_tests(checkout: Path, expression: str, is_verbose: bool) -> list[Check]:
    """Run the tests that start a server; ``expression`` chooses some of them, as pytest's ``-k``.

    Raises: CompatibilityError.
    """
    files = tests_of_a_server(checkout / TESTS)
    if not files:
        raise CompatibilityError(
            f"{checkout} has no {TESTS / FOLDERS[0]} with tests of a server; give a checkout of vLLM"
        )
    skipped = skipped_files(files)
    ENVIRONMENT.install()
    with tempfile.TemporaryDirectory(prefix="clients-") as temporary:
        folder = Path(temporary)
        report = folder / "report.xml"
        write_tokenizer(folder)
        variables = {
            "ACTORSERVE_PYTHON": sys.executable,
            "ACTORSERVE_TOKENIZER": str(folder),
            "ACTORSERVE_VERSION": actorserve.__version__,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "tools.compatibility.vllm_tests.plugin",
            "-W",
            "ignore",
            f"--timeout={TEST_TIMEOUT_S}",
        ]
        chosen = ["-k", expression] if expression else []
        where = ["-c", os.devnull, "--rootdir", str(checkout), "--confcutdir", str(checkout / TESTS / FOLDERS[0])]
        fitting = [str(checkout / TESTS / file) for file in files if file not in skipped]
        output = None if is_verbose else subprocess.DEVNULL
        command = [str(ENVIRONMENT.python), "-P", "-m", "pytest", *options, *where, f"--junitxml={report}"]
        subprocess.run(
            [*command, *chosen, *fitting],
            cwd=checkout,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            check=False,
        )
        return [*read_report(report), *(Check(file, skipped=reason) for file, reason in skipped.items())]


def tests_of_a_server(folder: Path) -> list[str]:
    """The files of tests that start a server, or whose folder's fixtures do. The others test vLLM's own classes."""
    files = [file for name in FOLDERS for file in (folder / name).rglob("*.py")]
    fixtures = {file.parent for file in files if file.name == "conftest.py" and SERVER in file.read_text("utf-8")}
    return sorted(
        file.relative_to(folder).as_posix()
        for file in files
        if file.name.startswith("test_")
        if file.parent in fixtures or SERVER in file.read_text("utf-8")
    )


def skipped_files(files: Sequence[str]) -> dict[str, str]:
    """The files that do not fit, each with the reason."""
    table: dict[str, str] = tomllib.loads(TABLE.read_text("utf-8"))["files"]
    return {file: reason for file in files for pattern, reason in table.items() if fnmatch(file, pattern)}
