"""A pytest plugin that points vLLM's tests at our server. It is loaded in the environment ``vllm-tests``."""

import importlib
import os
import sys
import tomllib
from collections.abc import Generator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import PreTrainedTokenizerFast

from tools.compatibility.vllm_tests.absent import AbsentModules, Running
from tools.compatibility.vllm_tests.remote_server import RemoteOpenAIServer

_TABLE: Final = tomllib.loads((Path(__file__).parent / "skipped.toml").read_text("utf-8"))


class NoDownloads:
    """In place of the hub, from which fixtures fetch models and LoRA adapters."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return "adapter"


class Platform:
    """What tests ask of the hardware, which is that of the server."""

    def is_rocm(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


class ModelConfig:
    """What tests ask of a model's configuration: the size of its vocabulary."""

    def __init__(self, **_: object) -> None:
        self._tokenizer = get_tokenizer()

    def get_vocab_size(self) -> int:
        return len(self._tokenizer)


def get_tokenizer(*_: object, **__: object) -> Any:
    """The default model's tokenizer, whichever name is asked for."""
    return PreTrainedTokenizerFast.from_pretrained(os.environ["ACTORSERVE_TOKENIZER"])


class AnyTokenizer:
    """In place of ``AutoTokenizer``, which would download another model's."""

    from_pretrained = staticmethod(get_tokenizer)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, Any, Any]:
    """Put the stand-ins in place before the first of vLLM's files is imported."""
    sys.path.insert(0, str(early_config.rootpath))  # vLLM's folder "tests" is meant, and not ours
    _give("transformers", AutoTokenizer=AnyTokenizer)
    AbsentModules("vllm", "torch", "tests.utils", "tests.conftest").install()
    _give("vllm.config", ModelConfig=ModelConfig)
    _give("vllm.exceptions", VLLMValidationError=ValueError)  # pytest.raises asks for a class
    _give("vllm.platforms", current_platform=Platform())
    _give("vllm.tokenizers", get_tokenizer=get_tokenizer)
    _give("vllm.transformers_utils.repo_utils", hf_api=NoDownloads)
    _give("vllm.version", __version__=os.environ["ACTORSERVE_VERSION"])
    _give(
        "tests.utils",
        RemoteOpenAIServer=RemoteOpenAIServer,
        ROCM_EXTRA_ARGS=[],
        VLLM_PATH=early_config.rootpath,
        multi_gpu_only=pytest.mark.skip("needs several GPUs"),
        requires_fp8=pytest.mark.skip("needs FP8 on a GPU"),
    )
    return (yield)


def _give(module: str, **values: object) -> None:
    """Give an absent module the names that tests need."""
    for name, value in values.items():
        setattr(importlib.import_module(module), name, value)


def reason_to_skip(item: pytest.Item) -> str:
    """Why a test does not fit, from the table; "" if it does."""
    name = item.nodeid.partition("tests/")[2] or item.nodeid
    for pattern, reason in _TABLE["tests"].items():
        if fnmatch(name.replace("[", "("), pattern.replace("[", "(")):
            return str(reason)
    values = getattr(item, "callspec", None)
    if values is not None and any("lora" in str(value).lower() for value in values.params.values()):
        return "LoRA adapters"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := reason_to_skip(item):
            item.add_marker(pytest.mark.skip(reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    Running.is_test = True
    try:
        return (yield)
    finally:
        Running.is_test = False
