"""Options and fixtures for all tests."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from actorserve.model_files.locate import locate
from tools.compiling import SWITCH, use_if_wanted

COMPILED = use_if_wanted()  # with ACTORSERVE_COMPILED=1 the tests run on the compiled core

# Torch reads this when it is loaded. If the cores are busy, threads that spin while they wait are ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell ignores Ctrl-C for what it runs in the background, and child processes inherit that; tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails because the machine is slow or busy.
settings.register_profile("actorserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("actorserve")

SERIAL = (
    "tests/e2e/",
    "tests/processes/",
    "tests/tools/",
    "tests/workers/engines/test_engine_thread.py",
    "tests/workers/kv_transfer/",
    "tests/test_cli.py",
    "tests/http/test_server.py",
)
"""Paths of the tests that start processes or measure time."""
COMPUTING = tuple(
    f"tests/tools/benchmarks/test_{name}.py"
    for name in ("gpu", "kernels", "launches", "mutants", "simulator_speed", "splitwise_sim", "splitwise_sim_runs")
)
"""Of these, tests that compute for long and wait for nothing, so others can run beside them."""


def pytest_configure() -> None:
    if os.environ.get(SWITCH) == "1" and not COMPILED:
        raise pytest.UsageError(f"{SWITCH} is 1, but these sources are not compiled; tools/compile does that")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kill-rounds", type=int, default=1, help="number of runs of the kill tests")
    parser.addoption(
        "--fault-examples", type=int, default=100, help="number of random histories of faults for clusters of cores"
    )
    parser.addoption("--first-fault-example", type=int, default=0, help="number of the first of these histories")
    parser.addoption(
        "--migration-faults", type=int, default=15, help="number of faults during migrations between real processes"
    )
    parser.addoption("--screenshots", default="", help="a folder for photographs of the dashboard under a real load")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that run one after the other as ``serial`` (for ``tools/test``), and skip those that cannot run on
    the compiled core if it is used.
    """
    for item in items:
        interpreted = item.get_closest_marker("interpreted")
        if COMPILED and interpreted is not None:
            item.add_marker(pytest.mark.skip(reason=f"interpreted only: {interpreted.args[0]}"))
        path = item.path.relative_to(config.rootpath).as_posix()
        if path.startswith(SERIAL) and path not in COMPUTING:
            item.add_marker(pytest.mark.serial)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_round" in metafunc.fixturenames:
        metafunc.parametrize("kill_round", range(metafunc.config.getoption("--kill-rounds")))


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """The root logger belongs to pytest, and gets back what a test that configures the log took from it."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def fault_examples(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-examples"))


@pytest.fixture(scope="session")
def first_fault_example(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--first-fault-example"))


@pytest.fixture(scope="session")
def migration_faults(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--migration-faults"))


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, downloaded if it is not in the cache."""
    return locate("default")
