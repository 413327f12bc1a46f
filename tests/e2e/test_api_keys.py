"""A server with API keys: which requests are allowed, and no key in any log."""

import asyncio
import hashlib
from pathlib import Path

import httpx
import openai
import pytest

from actorserve.core.messages import Start
from actorserve.wire.journal import read_entries
from tests.e2e.server import running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SECRET = "a-secret-that-must-not-show"
CONFIG = """
[http]
api_keys_file = "{keys}"
[cluster]
[workers]
count = 1
engine = "fake"
"""


def test_a_running_server_requires_its_keys(tmp_path: Path, default_model_path: Path) -> None:
    """Only /health needs no key, a request runs with its key's priority, and no log or journal has the key."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "team"\nsha256 = "{digest}"\npriority = 3\nbest_priority = 1\n')
    keys.chmod(0o600)

    with running(tmp_path / "server", CONFIG.format(keys=keys), "--model", str(default_model_path)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/version", "/v1/completions"):
            assert httpx.get(f"{server.url}{path}").status_code == 401

        async def ask(secret: str, **fields: int) -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as client:
                await client.completions.create(model=server.model, prompt="x", max_tokens=2, extra_body=fields)

        asyncio.run(ask(SECRET))
        asyncio.run(ask(SECRET, priority=1))
        with pytest.raises(openai.PermissionDeniedError):
            asyncio.run(ask(SECRET, priority=0))
        with pytest.raises(openai.AuthenticationError):
            asyncio.run(ask(SECRET + "x"))
    with server.journal("worker-0").open("rb") as file:
        asked = [entry.message.request for entry in read_entries(file) if isinstance(entry.message, Start)]
    assert [request.priority for request in asked] == [3, 1]
    written = [server.log, server.stdout, *server.journals.iterdir()]
    assert len(written) >= 5
    assert all(SECRET.encode() not in file.read_bytes() for file in written)
