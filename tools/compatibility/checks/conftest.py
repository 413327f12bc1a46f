"""What every check needs to know about the running server: where it is, the key, and the model's name."""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The server's address, without a path."""
    return os.environ["ACTORSERVE_URL"]


@pytest.fixture(scope="session")
def key() -> str:
    return os.environ["ACTORSERVE_KEY"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["ACTORSERVE_MODEL"]
