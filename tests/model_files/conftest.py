"""Fixtures for the tests of model files."""

from pathlib import Path

import pytest

from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def default_description(default_model_path: Path) -> ModelDescription:
    return describe(default_model_path)


@pytest.fixture(scope="session")
def default_tokenizer(default_description: ModelDescription) -> Tokenizer:
    return load_tokenizer(default_description)
