"""Fixtures: a fake driver with two GPUs."""

from pathlib import Path

import pytest

from tests.workers.power.fake_driver import FakeDriver, build_library


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_driver(fake_library: Path, tmp_path: Path) -> FakeDriver:
    folder = tmp_path / "gpus"
    folder.mkdir()
    return FakeDriver(fake_library, folder, 2)


@pytest.fixture
def loaded_driver(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver, in this process."""
    fake_driver.load(monkeypatch)
    return fake_driver
