"""Settings: defaults, file, options, and the errors for mistakes."""

import math
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from actorserve.core.scheduling.token_budget import MIN_PREFILL_TOKENS, TokenBudget
from actorserve.core.timing.step_times import StepTimes
from actorserve.errors import SettingsError
from actorserve.processes.child import read_settings, write_settings
from actorserve.settings import Settings, load_settings
from tests.core.harness.driver import PROFILE

EXAMPLE = Path(__file__).resolve().parent.parent / "config" / "actorserve.toml"


def test_the_example_shows_the_defaults() -> None:
    """config/actorserve.toml, read as it stands, gives exactly the defaults."""
    assert load_settings(EXAMPLE) == Settings()


def test_the_example_shows_every_setting() -> None:
    """config/actorserve.toml names every setting, and those without a fixed default behind a comment sign."""
    text = EXAMPLE.read_text(encoding="utf-8")
    shown = tomllib.loads(text)
    uncommented = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    for section, defaults in Settings():
        assert isinstance(defaults, BaseModel)
        names = type(defaults).model_fields
        assert set(uncommented[section]) == set(names)
        assert set(shown[section]) == {name for name in names if getattr(defaults, name) is not None}


def test_the_commented_examples_are_valid() -> None:
    """Taking away the comment signs of config/actorserve.toml gives settings that are accepted."""
    text = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert Settings.model_validate(tomllib.loads(text)) != Settings()


def test_options_override_the_file(tmp_path: Path) -> None:
    """An option on the command line replaces the file's value. Without the option the file's value stays."""
    file = tmp_path / "settings.toml"
    file.write_text('[http]\nport = 9000\nhost = "::1"\n', encoding="utf-8")
    settings = load_settings(file, {"http": {"port": 9001, "host": None}, "workers": {"count": None}})
    assert (settings.http.port, settings.http.host, settings.workers.count) == (9001, "::1", None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[http]\nprot = 1\n", ("http.prot",)),
        ("[htpp]\nport = 1\n", ("htpp",)),
        ("[http]\nport = 70000\n[workers]\ncount = 0\n", ("http.port", "workers.count")),
        ("[workers]\nmax_batch_requests = 8\nmax_batch_tokens = 23\n", ("max_batch_requests", "max_batch_tokens")),
        ("http = 3\n", ("http",)),
        ("[http\n", ("line 1",)),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    """A wrong file is refused with one line that names the file and each mistake."""
    file = tmp_path / "settings.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message
    assert all(name in message for name in names)


def test_a_full_batch_leaves_prefills_their_least() -> None:
    """The smallest accepted max_batch_tokens holds a full batch of decodes and the minimum of prefill tokens."""
    workers = {"max_batch_requests": 8, "max_batch_tokens": 8 + MIN_PREFILL_TOKENS}
    target_s = load_settings(None, {"workers": workers}).workers.tpot_target_s
    budget = TokenBudget(target_s, workers["max_batch_tokens"], StepTimes(PROFILE))
    assert budget.begin(8, 1000).take(100, 0) == MIN_PREFILL_TOKENS


def test_children_get_all_settings(tmp_path: Path) -> None:
    """A child reads settings equal to those that its parent wrote."""
    settings = load_settings(None, {"cluster": {"runtime_dir": str(tmp_path)}, "workers": {"count": 3, "threads": 2}})
    file = tmp_path / "settings.json"
    write_settings(settings, file)
    assert read_settings(file) == settings


def test_a_child_without_settings_says_so(tmp_path: Path) -> None:
    """Settings that cannot be read are a SettingsError."""
    with pytest.raises(SettingsError, match="cannot read settings"):
        read_settings(tmp_path / "absent.json")


def test_no_tpot_target_is_handed_to_children(tmp_path: Path) -> None:
    """Infinity, which means no target, is read from TOML and reaches a child."""
    file = tmp_path / "settings.toml"
    file.write_text("[workers]\ntpot_target_s = inf\n", encoding="utf-8")
    settings = load_settings(file)
    write_settings(settings, tmp_path / "settings.json")
    assert read_settings(tmp_path / "settings.json").workers.tpot_target_s == math.inf


@pytest.mark.parametrize(
    ("section", "name"),
    [("cluster", "no_instance_timeout_s"), ("cluster", "resume_timeout_s"), ("scaling", "start_timeout_s")],
)
def test_a_timeout_may_be_infinite(tmp_path: Path, section: str, name: str) -> None:
    """A timeout of ``inf`` never passes; ``nan`` is no time."""
    file = tmp_path / "a.toml"
    file.write_text(f"[{section}]\n{name} = inf\n", encoding="utf-8")
    assert getattr(getattr(load_settings(file), section), name) == math.inf
    file.write_text(f"[{section}]\n{name} = nan\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=f"{section}.{name}: Input should be greater"):
        load_settings(file)
