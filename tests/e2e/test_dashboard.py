"""The page to watch in a real browser: tiles, marks that glide to another tile when their requests move, and keys.

With ``--screenshots FOLDER`` the workers compute with the default model, and the page is photographed while a worker is
drained: ``.venv/bin/python -P -m pytest tests/e2e/test_dashboard.py --screenshots actorserve/http``.
"""

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.browser import Browser, browsing, chromium
from tests.e2e.server import Server, running, wait_until
from tests.folders import make_runtime_folder

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium (apt install chromium)"),
]

NUM_WORKERS = 3
NUM_CLIENTS = 24
SMALL_KV_BYTES = 320 * 2**20  # so that photographs show memory in use
VIEWER, USER = "a-key-to-look", "a-key-to-ask"
CONFIG = """
[http]
gateways = {gateways}
api_keys_file = "{keys}"
[cluster]
runtime_dir = "{runtime_dir}"
[workers]
count = 3
engine = "{engine}"
max_context_tokens = 2048
max_batch_requests = 16
{more}
"""
HAS_MARKS = f"document.querySelectorAll('#marks .mark').length >= {NUM_CLIENTS // 2}"
MOVES = """
(() => {
  const seen = {};
  const step = () => {
    for (const mark of document.querySelectorAll('#marks .mark[data-request]')) {
      const { x, y } = mark.getBoundingClientRect();
      (seen[mark.dataset.request] ??= []).push([mark.dataset.worker, Math.round(x), Math.round(y)]);
    }
    window.recording = requestAnimationFrame(step);
  };
  step();
  window.seen = seen;
})()
"""
"""Records in which tile each mark is, and where it is on the page, at each frame."""


class Load:
    """Clients that stream one completion after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_CLIENTS)]

    def _run(self, index: int) -> None:
        chance = random.Random(index)
        headers = {"authorization": f"Bearer {USER}"}
        with httpx.Client(timeout=120, headers=headers) as client:
            while not self._is_over.is_set():
                body = {
                    "model": self._server.model,
                    "prompt": "Once upon a time " * chance.choice([1, 8, 40]),
                    "max_tokens": chance.choice([300, 600, 900]),
                    "stream": True,
                    "ignore_eos": True,
                }
                try:
                    self._stream(client, body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                self._is_over.wait(chance.random() / 2)

    def _stream(self, client: httpx.Client, body: dict[str, object]) -> None:
        with client.stream("POST", f"{self._server.url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                self.problems.append(answer.read().decode())
            for _ in answer.iter_lines():
                if self._is_over.is_set():
                    return

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def serving(folder: Path, model: Path, engine: str, gateways: int) -> Iterator[tuple[Server, Path]]:
    """A server with a viewer's and a user's key, and its runtime folder."""
    keys = folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[[key]]\nname = "{role}"\nrole = "{role}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
            for role, secret in (("viewer", VIEWER), ("user", USER))
        )
    )
    keys.chmod(0o600)
    runtime_dir = make_runtime_folder()
    more = f"kv_cache_bytes = {SMALL_KV_BYTES}" if engine == "torch" else ""
    config = CONFIG.format(gateways=gateways, keys=keys, runtime_dir=runtime_dir, engine=engine, more=more)
    with running(folder / "server", config, "--model", str(model)) as server:
        yield server, runtime_dir


def enter_key(page: Browser, key: str) -> None:
    page.wait("document.getElementById('ask').open")
    page.run(f"document.getElementById('key').value = '{key}'; document.querySelector('#ask button').click()")


def console(runtime_dir: Path, *words: str) -> None:
    command = [sys.executable, "-P", "-m", "actorserve", "console", "--runtime-dir", str(runtime_dir), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)


def glided(path: list[list[object]]) -> bool:
    """Whether a mark changed its tile, and was shown at places between the two."""
    changes = [index for index in range(1, len(path)) if path[index][0] != path[index - 1][0] and path[index - 1][0]]
    return any(len({(x, y) for _, x, y in path[index : index + 400]}) >= 5 for index in changes)


def test_the_page(tmp_path: Path, default_model_path: Path, request: pytest.FixtureRequest) -> None:
    """A viewer's key shows all instances and the requests of both gateways. When a worker is drained, the marks of its
    requests glide to other tiles. The console of the browser stays empty, in light and in dark.
    """
    photos = request.config.getoption("--screenshots")
    program = chromium()
    assert program is not None
    with (
        serving(tmp_path, default_model_path, "torch" if photos else "fake", 2) as (server, runtime_dir),
        browsing(program, tmp_path) as page,
        Load(server) as load,
    ):
        page.open(f"{server.url}/dashboard", 1280, 640, scale=1.5)
        enter_key(page, "no-such-key")
        page.wait("document.getElementById('ask-problem').textContent.includes('a valid API key is needed')")
        enter_key(page, USER)
        page.wait("document.getElementById('ask-problem').textContent.includes('may not watch')")
        assert any("401" in problem for problem in page.problems), "the browser itself reports both refusals"
        page.problems.clear()
        enter_key(page, VIEWER)
        page.wait(f"document.querySelectorAll('.tile').length === {NUM_WORKERS}")
        page.wait(HAS_MARKS)
        page.wait("document.getElementById('link').dataset.state === 'live'")
        page.wait("document.querySelector('.chart .value').textContent.length > 1")
        if photos:
            time.sleep(100)  # so that the charts have something to show
        page.run(MOVES)
        console(runtime_dir, "drain", "worker-1")
        page.wait("document.querySelectorAll('#marks .mark[data-moved]').length > 0")
        if photos:
            page.wait("document.querySelectorAll('#trails path').length > 2")
            page.screenshot(Path(photos) / "dashboard-light.png")
        page.wait("document.querySelector('[data-instance=\"worker-1\"]').dataset.state === 'empty'")
        page.run("cancelAnimationFrame(window.recording)")
        paths = page.run("window.seen")
        assert [name for name, path in paths.items() if glided(path)], "some mark was seen on its way to another tile"
        assert page.run("document.querySelector('[data-instance=\"worker-1\"] .state').textContent") == "empty"
        console(runtime_dir, "uncordon", "worker-1")
        page.wait("document.querySelector('[data-instance=\"worker-1\"]').dataset.state === 'open'")
        light = page.run("getComputedStyle(document.body).backgroundColor")
        page.open(f"{server.url}/dashboard", 1280, 640, dark=True, scale=1.5)
        page.wait(HAS_MARKS)
        assert page.run("getComputedStyle(document.body).backgroundColor") != light
        assert page.run("document.querySelector('.chart path').getAttribute('d').length > 3"), "the history is there"
        if photos:
            console(runtime_dir, "drain", "worker-2")
            page.wait("document.querySelectorAll('#trails path').length > 2")
            page.screenshot(Path(photos) / "dashboard-dark.png")

        page.resize(390, 844)
        page.wait("document.querySelector('.tile').getBoundingClientRect().width > 300")
        assert page.run("document.documentElement.scrollWidth") <= 390, "nothing sticks out of a narrow window"
        assert page.problems == []
    assert load.problems == []


def test_a_page_finds_the_server_again(tmp_path: Path, default_model_path: Path) -> None:
    """When the gateway is restarted, the page says that it lost it, and goes on by itself. An open page does not keep
    the server from ending.
    """
    program = chromium()
    assert program is not None
    with (
        serving(tmp_path, default_model_path, "fake", 1) as (server, _),
        browsing(program, tmp_path) as page,
    ):
        page.open(f"{server.url}/dashboard")
        enter_key(page, VIEWER)
        page.wait(f"document.querySelectorAll('.tile').length === {NUM_WORKERS}")
        before = server.pid("gateway-0")
        assert before is not None
        page.run(
            "window.states = []; setInterval(() => states.push(document.getElementById('link').dataset.state), 20)"
        )
        subprocess.run(["kill", "-9", str(before)], check=True)
        wait_until(lambda: server.pid("gateway-0") not in (None, before), "a new gateway")
        page.wait("states.includes('waiting') && document.getElementById('link').dataset.state === 'live'")
        page.wait(f"document.querySelectorAll('.tile').length === {NUM_WORKERS}")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15, "the drain's time is 30 s"
