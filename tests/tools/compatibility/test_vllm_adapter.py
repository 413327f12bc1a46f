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
        "model": {"aliases": ["some/model"]},
        "workers": {"max_context_tokens": 1024},
        "http": {"max_top_logprobs": 30},
    }


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ([], 2048),
        (["--max-model-len", "18192"], 2048),
        (["--max-model-len", "18192", "--enable-chunked-prefill"], 8192),
    ],
)
def test_the_context_is_short_where_a_test_does_not_need_more(options: list[str], num_tokens: int) -> None:
    """An answer that a small model does not end is over soon, and tests of long prompts have room."""
    assert settings_of("some/model", options)["workers"]["max_context_tokens"] == num_tokens


def test_the_form_of_tool_calls_is_ours_or_skips_the_test() -> None:
    """vLLM's names of forms become ours, and a form that no parser of ours reads is named."""
    assert settings_of("some/model", ["--tool-call-parser", "llama3_json"])["model"]["tool_parser"] == "llama3"
    with pytest.raises(pytest.skip.Exception, match="granite"):
        settings_of("some/model", ["--tool-call-parser", "granite"])


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
        "entrypoints/openai/test_chat.py": "RemoteOpenAIServer",
        "entrypoints/openai/test_protocol.py": "nothing",
        "entrypoints/pooling/test_online.py": "RemoteOpenAIServer",
        "tool_use/conftest.py": "RemoteOpenAIServer",
        "tool_use/test_tool_calls.py": "client",
        "models/test_models.py": "RemoteOpenAIServer",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    files = files_of_a_server(tmp_path)
    assert files == [
        "entrypoints/openai/test_chat.py",
        "entrypoints/pooling/test_online.py",
        "tool_use/test_tool_calls.py",
    ]
    assert list(skipped_files(files)) == ["entrypoints/pooling/test_online.py"]
