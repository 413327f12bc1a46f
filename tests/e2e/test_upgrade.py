"""A rolling upgrade of three hosts to the next protocol, by the console, under streams and with deaths in between."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import Clients
from tests.e2e.hosts import CONFIG, Hosts, hosts_running
from tests.e2e.operator import DEADLINE_S, Console
from tests.e2e.server import Server, get, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NEXT = ("tests.e2e.next_version", "actorserve")
NUM_STREAMS = 6
MAX_TOKENS = 200
SHARES = {"alpha": "gateways = 1\nworkers = 1", "beta": "gateways = 1\nworkers = 1", "gamma": "workers = 2"}
COORDINATORS = ("alpha", "beta")
FIRST, OTHER = "alpha/coordinator", "beta/coordinator"
NUM_WORKERS = 4
STOP_S = 60.0
DRAINED = ("emptying", "empty")


@pytest.fixture
def hosts(tmp_path: Path, default_model_path: Path) -> Iterator[Hosts]:
    config = CONFIG.format(model=default_model_path)
    with hosts_running(tmp_path, config, SHARES, len(COORDINATORS), program=("actorserve",)) as hosts:
        for name in ("alpha", "beta"):
            wait_until(partial(has_all_workers, hosts.hosts[name].url), "all workers", DEADLINE_S)
        console = Console(*(hosts.runtime_dirs[name] for name in COORDINATORS))
        if serving(console) != FIRST:  # whichever was ready first serves
            hosts.hosts["beta"].signal(OTHER, signal.SIGKILL)
            wait_until(lambda: serving(console) == FIRST, "another coordinator", DEADLINE_S)
        yield hosts


def serving(console: Console) -> str:
    """The coordinator that serves; empty while none does."""
    try:
        rows = console.rows("status")
    except AssertionError:
        return ""
    return str(next(row["value"] for row in rows if row["name"] == "coordinator"))


async def _begin(server: Server, stack: AsyncExitStack) -> AsyncIterator[str]:
    """The lines of a long stream that has begun."""
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
    body = {"model": server.model, "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    request = client.stream("POST", f"{server.url}/v1/completions", json=body)
    lines = (await stack.enter_async_context(request)).aiter_lines()
    await anext(lines)
    return lines


def has_all_workers(url: str) -> bool:
    """Whether a gateway knows all workers."""
    return bool(get(f"{url}/ready").json().get("instances") == NUM_WORKERS)


class Upgrade:
    """The documented way to upgrade a host: drain, end, start the new program, uncordon."""

    def __init__(self, hosts: Hosts, console: Console) -> None:
        self._hosts = hosts
        self._console = console

    async def drain(self, host: str) -> None:
        await self._console.ask("drain", host, "--wait", "--wait-s", str(DEADLINE_S))
        assert await asyncio.to_thread(self.num_requests, host) == 0

    async def replace(self, host: str) -> None:
        """End the host in order, if it runs, and start the next version, which takes no requests yet."""
        server = self._hosts.hosts.pop(host, None)
        if server is not None:
            assert await asyncio.to_thread(server.stop, STOP_S) == 0
        await asyncio.to_thread(self._hosts.start(host, program=NEXT).wait_ready)
        await asyncio.to_thread(wait_until, self.all_are_up, "all workers", DEADLINE_S)

    async def uncordon(self, host: str) -> None:
        await self._console.ask("uncordon", host)
        await asyncio.to_thread(wait_until, lambda: set(self.states().values()) == {"open"}, "open workers")

    def states(self) -> dict[str, str]:
        """The states of the workers; none while no coordinator answers."""
        try:
            return self._console.states()
        except AssertionError:
            return {}

    def all_are_up(self) -> bool:
        states = self.states()
        return len(states) == NUM_WORKERS and "starting" not in states.values()

    def are_drained(self, host: str) -> bool:
        """Whether all workers are up, those of ``host`` are drained or about to be, and the others are open."""
        states = self.states()
        expected = {name: name.startswith(f"{host}/") for name in states}
        return self.all_are_up() and expected == {name: state in DRAINED for name, state in states.items()}

    def num_requests(self, host: str) -> int:
        rows = self._console.rows("workers", host)
        return sum(int(row["running"]) + int(row["waiting"]) for row in rows)


def test_hosts_are_upgraded_one_after_the_other_under_streams(hosts: Hosts) -> None:
    """Workers of the old and the new version serve together, through kill -9 of the coordinator that serves and of the
    host whose coordinator takes over; only the streams of the killed host's gateway break. Every coordinator serves
    once with followers of both versions.
    """
    asyncio.run(_upgrade(hosts))


async def _upgrade(hosts: Hosts) -> None:
    console = Console(*(hosts.runtime_dirs[name] for name in COORDINATORS))
    upgrade = Upgrade(hosts, console)
    alpha, beta = hosts.hosts["alpha"], hosts.hosts["beta"]
    clients = Clients(alpha, NUM_STREAMS, MAX_TOKENS)
    await clients.learn()
    async with clients.running():
        await upgrade.drain("gamma")
        assert await asyncio.to_thread(serving, console) == FIRST
        alpha.signal(FIRST, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: upgrade.are_drained("gamma"), "gamma's cordon", DEADLINE_S)
        assert await asyncio.to_thread(serving, console) == OTHER
        await upgrade.replace("gamma")
        assert await asyncio.to_thread(upgrade.are_drained, "gamma")
        await upgrade.uncordon("gamma")

        await console.ask("drain", "beta")
        async with AsyncExitStack() as stack:
            lost = [await _begin(beta, stack) for _ in range(3)]
            hosts.kill("beta")
            for lines in lost:
                with pytest.raises(httpx.HTTPError):
                    async for _ in lines:
                        pass
        await upgrade.replace("beta")
        assert await asyncio.to_thread(upgrade.are_drained, "beta")
        assert await asyncio.to_thread(serving, console) == FIRST
        await upgrade.uncordon("beta")

    # A load balancer sends new requests to the other gateways meanwhile.
    clients = Clients(hosts.hosts["beta"], NUM_STREAMS, MAX_TOKENS)
    await clients.learn()
    async with clients.running():
        await upgrade.drain("alpha")
        await upgrade.replace("alpha")
        assert await asyncio.to_thread(upgrade.are_drained, "alpha")
        await upgrade.uncordon("alpha")
        assert await asyncio.to_thread(serving, console) == OTHER
        done = clients.num_answers
        await asyncio.to_thread(wait_until, lambda: clients.num_answers >= done + NUM_STREAMS, "answers")
    assert all("malformed" not in host.log.read_text() for host in hosts.hosts.values())
