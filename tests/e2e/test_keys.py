"""Two hosts with keys: their processes talk over CURVE, and a host without its key is out while streams go on."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from actorserve.cluster.file import read_cluster_file
from actorserve.console.outcome import Exit
from actorserve.core.messages import PROTOCOL_VERSION, Hello, Peer, Role
from actorserve.programs.console import main as console_main
from actorserve.wire.codec import encode
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.envelope import ANY_INCARNATION, make_head
from actorserve.wire.trust import Holder, HolderKind
from tests.e2e.clients import under_load
from tests.e2e.hosts import CONFIG, NO_OWN_MOVES, Hosts, hosts_running, metric_of_host, wait_busy, wait_log
from tests.e2e.kv_starts import kv_starts
from tests.e2e.server import Server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

PEOPLE = {HolderKind.OPERATOR: ("ann", make_key_pair()), HolderKind.VIEWER: ("eve", make_key_pair())}
SHARES = {"alpha": "gateways = 1\nworkers = 1", "beta": "workers = 1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    people = "".join(f'[{kind}s]\n{name} = "{pair.public_key}"\n' for kind, (name, pair) in PEOPLE.items())
    shares = {**SHARES, "beta": f"{SHARES['beta']}\n{people}"}
    with hosts_running(folder, (CONFIG + NO_OWN_MOVES).format(model=default_model_path), shares, keys=True) as hosts:
        yield hosts


@pytest.fixture
def alpha(hosts: Hosts) -> Server:
    """The host with the coordinator and the gateway, while all workers are up."""
    server = hosts.hosts["alpha"]
    server.wait_workers(2)
    return server


def test_requests_move_between_hosts_with_keys(hosts: Hosts, alpha: Server) -> None:
    """Requests move to another host over encrypted sockets, with their KV, and their clients get undisturbed
    answers.
    """

    def num_moved() -> float:
        return metric_of_host(alpha, "actorserve_migrations_total", "alpha")  # its only worker's, so to the other host

    def disturb() -> None:
        hosts.restless(True)
        least = num_moved() + 10
        wait_until(lambda: num_moved() >= least, "moves to the other host")
        hosts.restless(False)

    asyncio.run(under_load(alpha, disturb))
    starts = kv_starts(hosts.hosts["beta"].journal("beta/worker-0"))
    assert sum(start.num_computed > 0 for start in starts) > 0.8 * len(starts) > 3


def test_a_removed_host_is_out_while_streams_go_on(hosts: Hosts, alpha: Server) -> None:
    """After its entry has gone from the cluster's file and the processes have reloaded, a host's frames are refused,
    its requests continue elsewhere with every token once, and it is back when its key is. An edit that is half written
    changes nothing.
    """
    text = hosts.cluster_file.read_text()
    without_beta = text[: text.index('[[host]]\nname = "beta"')] + text[text.index("[operators]") :]

    def reload(content: str) -> None:
        hosts.cluster_file.write_text(content)
        alpha.process.send_signal(signal.SIGHUP)

    def disturb() -> None:
        wait_busy(alpha, "beta")
        reload(text[: text.index('name = "beta"')])
        wait_log(alpha, "keys of the cluster could not be read again, so they stay as they were")
        wait_busy(alpha, "beta")
        reload(without_beta)
        wait_log(alpha, f"'beta/worker-0': unknown key ({hosts.pairs['beta'].public_key})")
        wait_until(lambda: alpha.num_reporting() == 1, "the removed host's worker is gone")
        wait_busy(alpha, "alpha")
        reload(text)
        alpha.wait_workers(2)
        wait_busy(alpha, "beta")

    assert asyncio.run(under_load(alpha, disturb)) > 0
    wait_until(lambda: alpha.metric("vllm:kv_cache_usage_perc") == 0.0, "all blocks free")


def test_a_console_from_afar(hosts: Hosts, alpha: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the cluster's file an operator acts, a viewer only reads, and a host's key does neither."""

    def console(key: Path, *verb: str) -> int:
        return console_main(["--cluster", str(hosts.cluster_file), "--key", str(key), "--timeout", "10", *verb])

    files = {}
    for kind, (name, pair) in PEOPLE.items():
        files[kind] = tmp_path / name
        write_key_file(files[kind], pair, Holder(kind, name))
    assert console(files[HolderKind.VIEWER], "workers") == Exit.DONE
    assert "beta/worker-0" in capsys.readouterr().out
    assert console(files[HolderKind.VIEWER], "cordon", "beta/worker-0") == Exit.REFUSED
    assert "viewer eve is a viewer, and cordon needs an operator" in capsys.readouterr().err
    assert console(files[HolderKind.OPERATOR], "reload-keys") == Exit.DONE
    wait_log(hosts.hosts["beta"], "read again: keys of the cluster")
    host_key = hosts.cluster_file.parent / "keys" / "beta.key"
    assert (
        console_main(["--cluster", str(hosts.cluster_file), "--key", str(host_key), "--timeout", "1", "status"])
        == Exit.TIMEOUT
    )
    wait_log(alpha, "not an operator's or viewer's key")
    assert console(files[HolderKind.OPERATOR], "audit", "--json") == Exit.DONE
    rows = [
        (row["caller"], row["verb"], row["outcome"])
        for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ]
    assert ("viewer eve", "cordon", "refused") in rows
    assert ("operator ann", "reload-keys", "done") in rows
    assert ("unknown", "connect", "refused") in rows


def test_strangers_and_false_names_get_nothing_through(hosts: Hosts, alpha: Server) -> None:
    """A process without a key, and one with another host's name, are refused with a line, and join nothing."""
    cluster = read_cluster_file(hosts.cluster_file)
    address = f"tcp://{cluster.coordinator_hosts[0].address}:{cluster.coordinator_port}"
    hello = encode(Hello(PROTOCOL_VERSION, Role.WORKER, "tcp://127.0.0.1:9", cluster_id="test"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as beta:
        connect_with_curve(beta, hosts.pairs["beta"], hosts.pairs["alpha"].public_key)
        for socket, name in ((stranger, "alpha/worker-7"), (beta, "alpha/worker-8")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send(make_head(Peer(name, 1), Peer("coordinator", ANY_INCARNATION)) + hello)
        wait_log(alpha, "failed handshake")
        wait_log(alpha, "refused a frame of 'alpha/worker-8': another host's name")
    assert "alpha/worker-7" not in alpha.log.read_text()
    assert alpha.num_reporting() == 2
