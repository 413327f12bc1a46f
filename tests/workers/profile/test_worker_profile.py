"""A worker gets the profile that its settings name, or a kept profile, or a new one, which is then kept."""

import fcntl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorserve.core.timing.profile import Profile
from actorserve.errors import ProfileError
from actorserve.processes.status import Reporter
from actorserve.profile_files import load_profile, save_profile
from actorserve.settings import Settings, load_settings
from tests.core.harness.profiles import PROFILE
from tests.workers.profile.cost_engine import CostEngine
from workers.engines.fake_engine import FakeEngine
from workers.profile.worker_profile import cpu_name, facts_of, profile_file, profile_of

MINE = replace(PROFILE, model="cost", kv_bytes_per_token=100)
DEADLINE_S = 60.0


class Told(Reporter):
    def __init__(self) -> None:
        super().__init__(None)
        self.texts: list[str] = []

    def loading(self, text: str, progress: float | None = None) -> None:
        self.texts.append(text)


def settings_with(**workers: Any) -> Settings:
    return load_settings(None, {"workers": {"device": "cpu", "threads": 3, **workers}})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


def test_a_first_start_measures_and_later_ones_do_not(cache: Path) -> None:
    """The first start keeps one file with its measurements, and the second start measures nothing."""
    first, told = CostEngine(), Told()
    profile = profile_of(first, settings_with(), told)
    assert profile.model == "cost"
    assert (profile.dtype, profile.threads, profile.kv_bytes_per_token) == ("int8", 3, 100)
    assert profile.decode_s(8, 800) == pytest.approx(0.005 + 0.0004 * 8 + 1e-6 * 800, rel=0.02)
    assert any("measuring" in text for text in told.texts)
    (file,) = cache.glob("*.toml")
    assert load_profile(file) == profile
    second, told = CostEngine(), Told()
    assert profile_of(second, settings_with(), told) == profile
    assert second.plans == []
    assert told.texts == []


def test_another_engine_has_another_profile() -> None:
    """Files differ by threads and by the engine's kind."""
    engine = CostEngine()
    other = CostEngine()
    other.kind = "other"
    files = {
        profile_file(measured, facts_of(settings_with(threads=threads)))
        for measured in (engine, other)
        for threads in (1, 2)
    }
    assert len(files) == 4
    assert all(file.name.startswith("cost-int8-") for file in files)


def test_a_damaged_file_is_measured_again(cache: Path) -> None:
    """An unreadable file in the cache is replaced, and so is a profile of another model."""
    settings = settings_with()
    file = profile_file(CostEngine(), facts_of(settings))
    cache.mkdir(parents=True)
    (cache / "partial-killed").touch()
    file.write_text("nonsense", encoding="utf-8")
    profile = profile_of(CostEngine(), settings, Told())
    assert load_profile(file) == profile
    assert not (cache / "partial-killed").exists()
    save_profile(replace(profile, model="else"), file)
    assert profile_of(CostEngine(), settings, Told()).model == "cost"


def test_a_named_profile_is_used_unchanged(tmp_path: Path, cache: Path) -> None:
    """``workers.profile`` is read, nothing is measured, and nothing is kept."""
    file = tmp_path / "mine.toml"
    save_profile(MINE, file)
    engine = CostEngine()
    assert profile_of(engine, settings_with(profile=str(file)), Told()) == MINE
    assert engine.plans == []
    assert not cache.exists()


@pytest.mark.parametrize(
    ("profile", "says"), [(PROFILE, "model is 'none'"), (replace(MINE, kv_bytes_per_token=7), "per_token is 7")]
)
def test_a_named_profile_of_another_model_is_refused(tmp_path: Path, profile: Profile, says: str) -> None:
    """The error is one line with the file's name, also if the file does not exist."""
    file = tmp_path / "mine.toml"
    save_profile(profile, file)
    with pytest.raises(ProfileError, match=f"mine.toml: .*{says}"):
        profile_of(CostEngine(), settings_with(profile=str(file)), Told())
    with pytest.raises(ProfileError, match=r"none\.toml"):
        profile_of(CostEngine(), settings_with(profile=str(tmp_path / "none.toml")), Told())


def test_a_profile_of_a_machine_that_drifted_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Serving goes on with such a profile, whether it was named, kept, or measured now."""
    file = tmp_path / "mine.toml"
    drifting = replace(MINE, errors=(("drift", 0.35),))
    save_profile(drifting, file)
    assert profile_of(CostEngine(), settings_with(profile=str(file)), Told()) == drifting
    assert "speed changed by 35 % while the profile" in caplog.text
    engine = CostEngine()
    engine.slowness = lambda number: 1.0 + number / 100
    for _ in range(2):
        caplog.clear()
        assert dict(profile_of(engine, settings_with(), Told()).errors)["drift"] > 0.1
        assert "speed changed by" in caplog.text
    caplog.clear()
    save_profile(MINE, file)
    profile_of(CostEngine(), settings_with(profile=str(file)), Told())
    assert "speed changed by" not in caplog.text


def test_a_fake_engine_is_not_measured(cache: Path) -> None:
    """Its profile says that every iteration takes the same time."""
    profile = profile_of(FakeEngine(), settings_with(engine="fake"), Told())
    assert profile.prefill_s(500, 1000) == profile.decode_s(60, 9000) == profile.min_iteration_s > 0.0
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is then measured at each start."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path / "file"))
    assert profile_of(CostEngine(), settings_with(), Told()).model == "cost"


def test_one_process_measures_and_others_wait(cache: Path) -> None:
    """While another process measures, a worker waits, says so, and then uses that process's profile."""
    engine, told, settings = CostEngine(), Told(), settings_with()
    waits = threading.Event()

    def loading(text: str, progress: float | None = None) -> None:
        told.texts.append(text)
        waits.set()

    told.loading = loading  # type: ignore[method-assign]
    cache.mkdir(parents=True)
    found: list[Profile] = []
    with (cache / "measuring.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(profile_of(engine, settings, told)))
        waiting.start()
        assert waits.wait(DEADLINE_S)
        save_profile(MINE, profile_file(engine, facts_of(settings)))
    waiting.join(DEADLINE_S)
    assert found == [MINE]
    assert told.texts == ["waiting for another worker to measure the engine's speed"]
    assert engine.plans == []


def test_the_cpu_is_named(tmp_path: Path) -> None:
    """The CPU has the name that it reports, or its architecture if it reports none."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz \n\nmodel name\t: B\n", encoding="utf-8")
    assert cpu_name(file) == "A CPU @ 2 GHz"
    file.write_text("processor\t: 0\n", encoding="utf-8")
    assert cpu_name(file) == cpu_name(tmp_path / "none") != ""
