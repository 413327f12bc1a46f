"""Where processes listen, and the addresses that they tell their peers."""

from pathlib import Path

import pytest

from actorserve.cluster.file import parse_cluster
from actorserve.cluster.network import HostNetwork, LocalNetwork, Place, console_addresses
from actorserve.errors import SettingsError
from actorserve.processes.child import Child
from actorserve.processes.status import Reporter
from actorserve.settings import Settings
from tests.cluster.files import THREE_HOSTS, three_hosts, write_cluster_file

EVERYWHERE = THREE_HOSTS.replace('bind = "127.0.0.2"', 'bind = "0.0.0.0"')


def test_one_host_listens_in_its_runtime_folder() -> None:
    """Without a cluster's file every address is a socket in the runtime folder, and is told as it is."""
    network = LocalNetwork(Path("/run/a"))
    assert network.cluster_id == ""
    assert network.coordinators == {"coordinator": "ipc:///run/a/coordinator.sock"}
    assert network.coordinator().bind == "ipc:///run/a/coordinator.sock"
    assert network.process("worker-0") == Place("ipc:///run/a/worker-0.sock")
    assert network.kv("worker-0", 0).announced("ipc:///run/a/worker-0.kv.sock") == "ipc:///run/a/worker-0.kv.sock"


def test_hosts_announce_their_address_with_the_port_that_was_taken(tmp_path: Path) -> None:
    """A socket that listens on every network is announced under the host's address, with its real port."""
    network = HostNetwork(parse_cluster(EVERYWHERE, tmp_path), "beta")
    assert network.cluster_id == "lab"
    assert network.coordinators == {"alpha/coordinator": "tcp://127.0.0.1:7000"}
    place = network.process("beta/worker-1")
    assert place.bind == "tcp://0.0.0.0:*"
    assert place.announced("tcp://0.0.0.0:40123") == "tcp://127.0.0.2:40123"


def test_coordinator_and_kv_have_fixed_ports(tmp_path: Path) -> None:
    """Firewalls can let these ports through: the coordinator's, and one for each worker's KV."""
    cluster = three_hosts(tmp_path)
    assert HostNetwork(cluster, "alpha").coordinator() == Place("tcp://127.0.0.1:7000", "127.0.0.1")
    kv = [HostNetwork(cluster, "beta").kv(f"beta/worker-{index}", index).bind for index in range(2)]
    assert kv == ["tcp://127.0.0.2:7100", "tcp://127.0.0.2:7101"]


def test_consoles_have_a_port_if_there_are_operators_or_viewers(tmp_path: Path) -> None:
    """Without them the port is not opened."""
    assert HostNetwork(three_hosts(tmp_path), "alpha").console() is None
    assert LocalNetwork(tmp_path).console() is None
    text = f'{THREE_HOSTS}[viewers]\neve = "rq:rM>}}U?@Lns47E1%kR.o@n%FcmmsL/@{{H8]yf7"\n'
    cluster = parse_cluster(text.replace('id = "lab"', 'id = "lab"\nconsole_port = 7200'), tmp_path)
    assert HostNetwork(cluster, "alpha").console() == Place("tcp://127.0.0.1:7200", "127.0.0.1")
    assert console_addresses(cluster)["alpha"] == "tcp://127.0.0.1:7200"


def test_ipv6_addresses_stand_in_brackets(tmp_path: Path) -> None:
    """An address with colons is told from its port by brackets."""
    place = HostNetwork(three_hosts(tmp_path), "gamma").process("gamma/worker-0")
    assert place.bind == "tcp://[::1]:*"
    assert place.announced("tcp://[::1]:40123") == "tcp://[::1]:40123"


def test_a_name_is_looked_up_to_listen_and_told_as_it_is(tmp_path: Path) -> None:
    """Sockets listen at numbers, while peers get the name, which each of them looks up."""
    write_cluster_file(tmp_path, THREE_HOSTS.replace('"127.0.0.1"', '"localhost"'))
    child = Child("x", Settings(), tmp_path, Reporter(None), cluster_file=tmp_path / "cluster.toml", host="alpha")
    place = child.network.process("alpha/gateway-0")
    assert place.bind == "tcp://127.0.0.1:*"
    assert place.announced("tcp://127.0.0.1:40123") == "tcp://localhost:40123"


def test_an_unknown_host_is_refused(tmp_path: Path) -> None:
    """A process on a host that the file lacks does not start."""
    with pytest.raises(SettingsError, match="host delta is unknown"):
        HostNetwork(three_hosts(tmp_path), "delta")


def test_a_name_in_a_folder_has_no_slash(tmp_path: Path) -> None:
    """The host's part of a name is left out of the names of files."""
    assert Child("beta/worker-1", Settings(), tmp_path, Reporter(None)).file_name == "worker-1"
    assert Child("worker-1", Settings(), tmp_path, Reporter(None)).file_name == "worker-1"
