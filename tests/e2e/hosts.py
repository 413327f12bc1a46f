"""A cluster of hosts on the addresses of loopback, each with a supervisor of its own."""

import json
import os
import random
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import Holder, HolderKind
from tests.e2e.fault_rules import FaultRules
from tests.e2e.server import Server, get, wait_until
from tests.folders import make_runtime_folder

NUM_KV_PORTS = 2  # of each host
CONFIG = """
[http]
port = 0
[cluster]
heartbeat_s = 0.2
death_after_s = 1.5
load_report_s = 0.1
retry_s = 0.3
[model]
path = "{model}"
[workers]
engine = "fake"
kv_cache_bytes = 65536
max_batch_requests = 16
[supervision]
max_restarts = 1000
backoff_s = 0.1
max_backoff_s = 0.1
"""
"""Settings of the hosts, but for the model's path."""

NO_OWN_MOVES = """
[migration]
enabled = false  # tests.e2e.faults orders the migrations
"""


def free_ports(count: int, addresses: list[str]) -> int:
    """The first of ``count`` ports in a row that are free on all addresses.

    They lie below the ports that the kernel chooses itself (``ip_local_port_range``), so that it gives them to nobody.
    """
    while True:
        first = random.randrange(10_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for address in addresses:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server((address, port)))
            return first


class Hosts:
    """The hosts by name, with the runtime folders by which consoles find them. ``shares``: host -> what runs there, as
    lines of the cluster's file; the first ``num_coordinators`` have coordinators. ``pairs``: the hosts' key pairs;
    empty without keys.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        shares: Mapping[str, str],
        num_coordinators: int = 1,
        *,
        keys: bool = False,
        program: tuple[str, ...] | None = None,
        prefixes: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Write the cluster's file and the hosts' key files; ``start`` starts hosts, with faults unless another
        ``program`` is given.

        ``prefixes``: host -> the command that runs its program, such as one that enters a namespace.
        """
        self._prefixes = prefixes or {}
        self.pairs = {name: make_key_pair() for name in shares if keys}
        for name, pair in self.pairs.items():
            write_key_file(self._key_file(folder, name), pair, Holder(HolderKind.HOST, name))
        keys_of = {name: f'public_key = "{pair.public_key}"\n' for name, pair in self.pairs.items()}
        shares = {name: f"{keys_of.get(name, '')}{share}" for name, share in shares.items()}
        self._folder = folder
        self._config = config
        addresses = {name: f"127.0.0.{number}" for number, name in enumerate(shares, 1)}
        first = free_ports(2 + NUM_KV_PORTS, [addresses[name] for name in shares if name not in self._prefixes])
        self.cluster_file = folder / "cluster.toml"
        self.cluster_file.write_text(
            f'id = "test"\ncoordinators = {json.dumps(list(shares)[:num_coordinators])}\n'
            f"coordinator_port = {first}\nconsole_port = {first + 1}\nkv_port = {first + 2}\n"
            + "".join(f'[[host]]\nname = "{n}"\naddress = "{addresses[n]}"\n{share}\n' for n, share in shares.items())
        )
        self.runtime_dirs = {name: make_runtime_folder() for name in shares}
        self.hosts: dict[str, Server] = {}
        self._rules = FaultRules(folder)
        self._program = program or self._rules.program

    @staticmethod
    def _key_file(folder: Path, name: str) -> Path:
        return folder / "keys" / f"{name}.key"

    def restless(self, is_restless: bool) -> None:
        """Have the coordinator move requests all the time, or stop that."""
        self._rules.set(restless=is_restless)

    def start(
        self,
        name: str,
        *,
        cluster_file: Path | None = None,
        config: str | None = None,
        program: tuple[str, ...] | None = None,
    ) -> Server:
        """Start a host's share. The files and the program are those of the cluster, unless given."""
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        self.hosts[name] = Server(
            folder,
            self._config if config is None else config,
            program=program or self._program,
            prefix=self._prefixes.get(name, ()),
            verb=(
                *("host", name, "--cluster", str(cluster_file or self.cluster_file)),
                *("--key", str(self._key_file(self._folder, name))),
                *("--runtime-dir", str(self.runtime_dirs[name])),
            ),
        )
        return self.hosts[name]

    def kill(self, name: str) -> None:
        """kill -9 of the supervisor, with which the kernel kills its children."""
        process = self.hosts.pop(name).process
        process.kill()
        process.wait(10)

    def kill_workers(self, name: str, count: int) -> list[int]:
        """kill -9 of the host's workers at once. Returns the ids of their processes."""
        pids = [self.hosts[name].pid(f"{name}/worker-{index}") for index in range(count)]
        found = [pid for pid in pids if pid is not None]
        assert len(found) == count
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def stop(self) -> None:
        """Stop all hosts, the one with the gateways first, and check that they end well."""
        statuses = {name: host.stop() for name, host in self.hosts.items()}
        self.hosts.clear()
        assert set(statuses.values()) <= {0}, statuses


@contextmanager
def hosts_running(
    folder: Path,
    config: str,
    shares: Mapping[str, str],
    num_coordinators: int = 1,
    *,
    keys: bool = False,
    program: tuple[str, ...] | None = None,
    prefixes: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[Hosts]:
    """Hosts that are ready. They are stopped at the end."""
    hosts = Hosts(folder, config, shares, num_coordinators, keys=keys, program=program, prefixes=prefixes)
    try:
        for name in shares:
            hosts.start(name)
        for host in hosts.hosts.values():
            host.wait_ready()
        yield hosts
        hosts.stop()
    finally:
        for name in list(hosts.hosts):
            hosts.kill(name)


def metric_of_host(server: Server, name: str, host: str) -> float:
    """The sum of a metric over the workers of ``host``, as ``server``'s gateway tells it."""
    lines = get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{engine="{host}/'))


def wait_busy(server: Server, host: str) -> None:
    """Wait until workers of ``host`` have tokens in their KV cache."""
    wait_until(lambda: metric_of_host(server, "vllm:kv_cache_usage_perc", host) > 0.0, f"requests on {host}")


def wait_log(host: Server, text: str) -> None:
    """Wait until the host's processes have logged ``text``."""
    wait_until(lambda: text in host.log.read_text(), f"the log line: {text}")
