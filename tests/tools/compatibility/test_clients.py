"""The table of clients, and the versions that they are installed with."""

import re
from pathlib import Path

from tools.compatibility.clients import CHECKS, CLIENTS
from tools.compatibility.environments import PINS


def test_every_file_of_checks_belongs_to_one_client() -> None:
    """No file of checks is forgotten, and none runs twice."""
    used = [file for client in CLIENTS.values() for file in client.checks]
    there = [file.name for file in CHECKS.iterdir() if re.match(r"test_.*\.py$|.*\.test\.mjs$", file.name)]
    assert sorted(used) == sorted(there)


def test_every_environment_has_pins() -> None:
    """Each client's environment has a file or a folder of versions."""
    names = {client.environment.name for client in CLIENTS.values()}
    assert [name for name in names if not ((PINS / f"{name}.txt").exists() or (PINS / name).is_dir())] == []


def test_versions_of_python_packages_are_exact() -> None:
    """Every line of a list of pins is a package with one version."""
    lines = [line for file in PINS.glob("*.txt") for line in file.read_text("utf-8").splitlines()]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+(?:\[\w+\])?==[\w.+!-]+", line)] == []


def test_the_lock_names_no_host() -> None:
    """Node's packages come from the registry that the user's npm is configured for."""
    lock = Path(PINS / "node" / "package-lock.json").read_text("utf-8")
    assert '"resolved"' not in lock
    assert '"integrity"' in lock
