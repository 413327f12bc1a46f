"""Two hosts over tcp, as two groups of processes on two addresses: streams survive the death and the end of a host."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import under_load
from tests.e2e.hosts import CONFIG, NO_OWN_MOVES, Hosts, hosts_running, metric_of_host, wait_busy, wait_log
from tests.e2e.kv_starts import kv_starts
from tests.e2e.server import Server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SHARES = {"alpha": "gateways = 1\nworkers = 1", "beta": "workers = 2"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosts_running(folder, (CONFIG + NO_OWN_MOVES).format(model=default_model_path), SHARES) as hosts:
        hosts.hosts["alpha"].wait_workers(3)
        yield hosts


@pytest.fixture
def alpha(hosts: Hosts) -> Server:
    """The host with the coordinator and the gateway, while all workers are up."""
    server = hosts.hosts["alpha"]
    server.wait_workers(3)
    return server


def test_a_killed_host_costs_no_token(hosts: Hosts, alpha: Server) -> None:
    """kill -9 of a host's workers, and of the whole host, under load: every client gets its undisturbed answer, and the
    host serves again when it is back.
    """

    def kill(kill_it: Callable[[], object]) -> None:
        wait_busy(alpha, "beta")
        failovers = alpha.metric("actorserve_failovers_total")
        kill_it()
        wait_until(lambda: alpha.metric("actorserve_failovers_total") > failovers, "requests continue elsewhere")

    def disturb() -> None:
        kill(lambda: hosts.kill_workers("beta", 2))
        alpha.wait_workers(3)
        kill(lambda: hosts.kill("beta"))
        hosts.start("beta").wait_ready()
        alpha.wait_workers(3)

    assert asyncio.run(under_load(alpha, disturb)) > 0
    wait_until(lambda: alpha.metric("vllm:kv_cache_usage_perc") == 0.0, "all blocks free")


def test_requests_move_between_hosts_with_their_kv(hosts: Hosts, alpha: Server) -> None:
    """Requests that move to another host over tcp bring their KV, and their clients get undisturbed answers."""

    def num_moved() -> float:
        return metric_of_host(alpha, "actorserve_migrations_total", "alpha")  # its only worker's, so to the other host

    def disturb() -> None:
        hosts.restless(True)
        least = num_moved() + 10
        wait_until(lambda: num_moved() >= least, "moves to the other host")
        hosts.restless(False)

    asyncio.run(under_load(alpha, disturb))
    beta = hosts.hosts["beta"]
    starts = [start for index in range(2) for start in kv_starts(beta.journal(f"beta/worker-{index}"))]
    assert sum(start.num_computed > 0 for start in starts) > 0.8 * len(starts) > 3


def test_a_host_that_ends_in_order_fails_no_request(hosts: Hosts, alpha: Server) -> None:
    """SIGTERM of a host under load: its requests end or move, it exits with 0, and no client notices."""

    def disturb() -> None:
        wait_busy(alpha, "beta")
        assert hosts.hosts.pop("beta").stop(40.0) == 0
        wait_until(lambda: alpha.num_reporting() == 1, "the other host's workers are gone")
        hosts.start("beta").wait_ready()
        alpha.wait_workers(3)

    assert asyncio.run(under_load(alpha, disturb)) > 0


def test_a_host_of_the_next_version_works_with_this_one(hosts: Hosts, alpha: Server) -> None:
    """A host is upgraded to the next protocol, whose messages have further fields, under load; then the coordinator and
    the upgraded workers are killed: every client gets its undisturbed answer.
    """

    def disturb() -> None:
        assert hosts.hosts.pop("beta").stop(40.0) == 0
        hosts.start("beta", program=("tests.e2e.next_version", "actorserve")).wait_ready()
        alpha.wait_workers(3)
        wait_busy(alpha, "beta")
        alpha.signal("alpha/coordinator", signal.SIGKILL)
        hosts.kill_workers("beta", 2)
        alpha.wait_workers(3)
        wait_busy(alpha, "beta")

    assert asyncio.run(under_load(alpha, disturb)) > 0
    assert "malformed" not in alpha.log.read_text() + hosts.hosts["beta"].log.read_text()


def test_a_host_of_another_cluster_is_refused(hosts: Hosts, alpha: Server) -> None:
    """Processes that belong to another cluster are refused, and both sides log both ids."""
    hosts.hosts.pop("beta").stop()
    other = hosts.cluster_file.with_name("other.toml")
    other.write_text(hosts.cluster_file.read_text().replace('"test"', '"prod"'))
    beta = hosts.start("beta", cluster_file=other)
    wait_log(alpha, "alpha/coordinator refuses beta/worker-0: its cluster's id is 'prod', and this process's is 'test'")
    wait_log(beta, "beta/worker-0 refuses alpha/coordinator: its cluster's id is 'test', and this process's is 'prod'")
    assert alpha.num_reporting() == 1
    beta.stop()
    hosts.start("beta").wait_ready()


def test_a_host_with_another_model_is_refused(hosts: Hosts, alpha: Server, default_model_path: Path) -> None:
    """Workers of other weights are refused, although the model has the same name and shape; requests go on."""
    hosts.hosts.pop("beta").stop()
    other = hosts.cluster_file.parent / default_model_path.name
    data = bytearray(default_model_path.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    beta = hosts.start("beta", config=(CONFIG + NO_OWN_MOVES).format(model=other))
    wait_log(alpha, "alpha/coordinator refuses beta/worker-0: its model has the digest")
    wait_log(beta, "beta/worker-0 refuses alpha/coordinator: its model has the digest")
    body = {"model": alpha.model, "prompt": "x", "max_tokens": 3}
    assert httpx.post(f"{alpha.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert alpha.num_reporting() == 1
    beta.stop()
    hosts.start("beta").wait_ready()
