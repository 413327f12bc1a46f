"""What every check needs to know about the running server: where it is, the key, and the model's name."""

import os
import urllib.request
from collections.abc import Callable

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


@pytest.fixture
def answered(url: str, key: str) -> Callable[[], tuple[int, int]]:
    """Asks how many requests the server has answered with success, and how many with an error."""

    def ask() -> tuple[int, int]:
        request = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as page:
            lines = page.read().decode().splitlines()
        good = bad = 0
        for line in lines:
            if line.startswith("http_requests_total{") and 'handler="/metrics"' not in line:
                count = int(float(line.rsplit(" ", 1)[1]))
                good, bad = (good + count, bad) if 'status="2xx"' in line else (good, bad + count)
        return good, bad

    return ask
