"""An actuator with a key of its own, in a cluster with keys: over tcp it obeys the coordinator alone."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from actorserve.core.messages import Peer, SetPowerCaps
from actorserve.wire.codec import encode
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.curve.sockets import connect_with_curve
from actorserve.wire.envelope import make_head
from actorserve.wire.trust import Holder, HolderKind, KeyPair
from tests.e2e.hosts import CONFIG, Hosts
from tests.e2e.operator import Console
from tests.e2e.server import ROOT, wait_until
from tests.workers.power.fake_driver import FakeDriver, build_library

pytestmark = [pytest.mark.e2e, pytest.mark.model]

HOST = "alpha"
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


@contextmanager
def actuator(
    folder: Path, hosts: Hosts, driver: FakeDriver, key_file: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """An actuator process of the host, and its log. It is killed at the end if it still runs."""
    options = ("--host", HOST, "--cluster", str(hosts.cluster_file), "--key", str(key_file))
    state = ("--state-dir", str(folder / "state"), "--config", str(hosts.hosts[HOST].log.with_name("actorserve.toml")))
    log_file = folder / "power.log"
    environment = os.environ | driver.environment | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log_file.open("ab") as log:
        command = [sys.executable, "-P", "-m", "actorserve", "power", *options, *state]
        process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
    try:
        yield process, log_file
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def address_of(pid: int) -> str:
    """The address on which a process listens on tcp."""
    folder = Path("/proc") / str(pid) / "fd"
    inodes = {os.readlink(entry).removeprefix("socket:[").removesuffix("]") for entry in folder.iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS and words[9] in inodes:
            host, port = words[1].split(":")
            return f"tcp://{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}"
    raise AssertionError("the process listens on no port")


def send_as(own: KeyPair | None, server_key: str, address: str, name: str, message: SetPowerCaps) -> None:
    """Send the message to the actuator, as a process that calls itself ``name``, with this key pair or with none."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as forger:
        if own is not None:
            connect_with_curve(forger, own, server_key)
        forger.setsockopt(zmq.LINGER, 1000)
        forger.connect(address)
        forger.send(make_head(Peer(name, 1), Peer(f"{HOST}/power", 1)) + encode(message))


def test_an_actuator_with_a_key_obeys_the_coordinators_key_alone(tmp_path: Path, default_model_path: Path) -> None:
    """The coordinator's cap arrives over CURVE. The same message with another host's key, with the actuator's own key
    and with none changes nothing, and lines in the log name the forged sender and the key.
    """
    own, other = make_key_pair(), make_key_pair()
    key_file = tmp_path / "alpha.actuator"
    write_key_file(key_file, own, Holder(HolderKind.ACTUATOR, HOST))
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    driver = FakeDriver(build_library(tmp_path), gpus, 2)
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    share = f'actuator_key = "{own.public_key}"\ngateways = 1\nworkers = 1'
    beta = f'public_key = "{other.public_key}"\nworkers = 1'  # it is never started
    hosts = Hosts(cluster, CONFIG.format(model=default_model_path), {HOST: share}, keys=True, program=("actorserve",))
    text = hosts.cluster_file.read_text()
    hosts.cluster_file.write_text(f'{text}[[host]]\nname = "beta"\naddress = "127.0.0.2"\n{beta}\n')
    console = Console(hosts.runtime_dirs[HOST])
    server = hosts.start(HOST)
    try:
        server.wait_ready()
        with actuator(tmp_path, hosts, driver, key_file) as (process, log):
            wait_until(lambda: len(console.rows("cap")) == 2, "the actuator's report")
            console.act("budget", "800", HOST)
            wait_until(lambda: (driver.limit(0), driver.limit(1)) == (400.0, 400.0), "the coordinator's caps")
            order = SetPowerCaps(2**40, ("GPU-0", "GPU-1"), (650.0, 650.0), None)
            address = address_of(process.pid)
            for forged_by, name in ((other, "coordinator"), (own, "coordinator"), (other, f"{HOST}/power")):
                send_as(forged_by, own.public_key, address, name, order)
            send_as(None, own.public_key, address, "coordinator", order)
            wait_until(lambda: "refused a frame of 'coordinator'" in log.read_text(), "a line about the forger")
            wait_until(lambda: other.public_key in log.read_text(), "the forger's key in the log")
            time.sleep(1.0)  # more than a control period
            assert (driver.limit(0), driver.limit(1)) == (400.0, 400.0)
            process.terminate()
            assert process.wait(30.0) == 0
            assert (driver.limit(0), driver.limit(1)) == (700.0, 700.0)
        hosts.stop()
    finally:
        for name in list(hosts.hosts):
            hosts.kill(name)
