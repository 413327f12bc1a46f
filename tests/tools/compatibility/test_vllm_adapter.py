"""The adapter between vLLM's own tests and our server, without vLLM."""

import importlib
import sys
from pathlib import Path

import pytest

from tools.compatibility.vllm_tests.absent import Absent, AbsentModules, Running
from tools.compatibility.vllm_tests.remote_server import settings_of
from tools.compatibility.vllm_tests.run import skipped_files, tests_of_a_server as files_of_a_server


def test_options_become_settings() -> None:
    """vLLM's options are settings of ours or have no meaning for us, in both spellings."""
    options = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len=1024", "--max_logprobs", "30"]
    assert settings_of("some/model", options) == {
        "model": {"name": "some/model"},
        "workers": {"max_context_tokens": 1024},
        "http": {"max_top_logprobs": 30},
    }


def test_an_unknown_option_skips_the_test() -> None:
    """A test whose server needs what we do not have is skipped, and the option is named."""
    with pytest.raises(pytest.skip.Exception, match="--tensor-parallel-size"):
        settings_of("some/model", ["--tensor-parallel-size", "2"])


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [AbsentModules("absent_package"), *sys.meta_path])
    for name in [name for name in sys.modules if name.startswith("absent_package")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("absent")
def test_absent_modules_can_be_imported() -> None:
    """Anything can be imported from an absent package, is false, and can be subclassed and called at import."""
    module = importlib.import_module("absent_package.deep.module")
    assert isinstance(module.Thing, Absent)
    assert not module.platform.is_gpu()
    assert type("Derived", module.Thing.__mro_entries__(()), {})


@pytest.mark.usefixtures("absent")
def test_a_test_that_calls_an_absent_class_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that needs the package's code and not only a server is skipped, and the class is named."""
    monkeypatch.setattr(Running, "is_test", True)
    module = importlib.import_module("absent_package.protocol")
    with pytest.raises(pytest.skip.Exception, match=r"absent_package\.protocol\.Request"):
        module.Request(model="m")


def test_files_that_start_a_server_are_found(tmp_path: Path) -> None:
    """A file counts if it or its folder's fixtures start a server; those that do not fit have a reason."""
    for name, text in {
        "openai/test_chat.py": "RemoteOpenAIServer",
        "openai/test_protocol.py": "nothing",
        "responses/conftest.py": "RemoteOpenAIServer",
        "responses/test_basic.py": "client",
        "pooling/test_online.py": "RemoteOpenAIServer",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    files = files_of_a_server(tmp_path)
    assert files == ["openai/test_chat.py", "pooling/test_online.py", "responses/test_basic.py"]
    assert list(skipped_files(files)) == ["pooling/test_online.py"]
