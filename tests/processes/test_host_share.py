"""What runs on one host of a cluster, how it ends, and the mistakes that are found before."""

import socket
import tempfile
from pathlib import Path

import pytest

from actorserve.cli import main
from actorserve.processes.launch import Placement
from actorserve.processes.runtime_folder import HOST, folder_of_host, host_text, runtime_folder
from actorserve.processes.supervision_tree import HostShare, supervision_tree
from actorserve.settings import ClusterSettings, Settings
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import Holder, HolderKind
from tests.cluster.files import THREE_HOSTS, with_keys, write_cluster_file
from tests.e2e.hosts import free_ports


def test_a_host_runs_its_share_under_its_name(tmp_path: Path) -> None:
    """Names begin with the host's; every child gets the cluster's file and that name."""
    cluster, key = tmp_path / "etc.toml", tmp_path / "beta.key"
    share = HostShare("beta", THREE_HOSTS, False, 2, cluster, key)
    children = supervision_tree(Placement(2, (), 1), Settings(), tmp_path / "s.json", tmp_path, share).children
    assert [child.name for child in children] == ["beta/gateway-0", "beta/gateway-1", "beta/worker-0", "beta/worker-1"]
    copy = str(tmp_path / "cluster.toml")
    for child in children:
        expected = ("--cluster", copy, "--host", "beta", "--cluster-source", str(cluster), "--key", str(key))
        assert child.command[-8:] == expected
    share = HostShare("alpha", THREE_HOSTS, has_coordinator=True, num_gateways=0)
    children = supervision_tree(Placement(0, (), 1), Settings(), tmp_path / "s.json", tmp_path, share).children
    assert [child.name for child in children] == ["alpha/coordinator"]


@pytest.mark.parametrize(
    ("key_of", "problem"),
    [
        (None, "cannot read the key file"),
        ("beta", "the secret key belongs to host beta, and not to host alpha"),
        ("stranger", "the secret key belongs to no host of the cluster, and not to host alpha"),
    ],
)
def test_a_host_without_its_own_secret_key_does_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key_of: str | None, problem: str
) -> None:
    """A secret key that is missing, another host's or unknown ends with one line, before anything starts."""
    pairs = {name: make_key_pair() for name in ("alpha", "beta", "gamma", "stranger")}
    file = write_cluster_file(tmp_path, with_keys(THREE_HOSTS, pairs))
    key = tmp_path / "alpha.key"
    if key_of is not None:
        write_key_file(key, pairs[key_of], Holder(HolderKind.HOST, key_of))
    refusal = _refusal(["host", "alpha", "--cluster", str(file), "--key", str(key)], capsys)
    assert "host alpha cannot run here: " in refusal
    assert problem in refusal
    assert all(pair.secret_key not in refusal for pair in pairs.values())


def test_a_host_beyond_loopback_needs_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without keys a host that other machines can reach does not start."""
    file = write_cluster_file(tmp_path, THREE_HOSTS.replace('bind = "127.0.0.2"', 'bind = "0.0.0.0"'))
    assert "host beta listens at 0.0.0.0, where other machines can connect, so every host needs a public_key" in (
        _refusal(["host", "gamma", "--cluster", str(file)], capsys)
    )


def test_workers_of_a_cluster_drain_before_the_coordinator_ends(tmp_path: Path) -> None:
    """On a host of a cluster workers have the drain's time, because other hosts' gateways use them, too; the
    coordinator, which finds places for their requests, ends after them.
    """
    share = HostShare("beta", THREE_HOSTS, has_coordinator=True, num_gateways=0)
    tree = supervision_tree(Placement(1, (), 1), Settings(), tmp_path / "s.json", tmp_path, share)
    stages = {child.name: child.stop_stage for child in tree.children}
    assert stages["beta/worker-0"] < tree.num_draining_stages <= stages["beta/coordinator"]


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("old", "new", "name", "problem"),
    [
        ("", "", "betta", 'host betta is unknown; did you mean "beta"?'),
        ('"beta"', '"alpha"', "alpha", "two hosts are called alpha"),
        ("127.0.0.", "192.0.2.", "alpha", "host alpha cannot run here: cannot listen on 192.0.2.1"),
        ('"127.0.0.1"', '"a.invalid"', "gamma", "host gamma cannot run here: address a.invalid cannot be looked up"),
        ("[[host]]", "[[hosts]]", "alpha", "hosts: unknown"),
    ],
)
def test_a_wrong_cluster_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, name: str, problem: str
) -> None:
    """A wrong file, a wrong name and another machine's address end with one line, before anything starts."""
    pairs = {host: make_key_pair() for host in ("alpha", "beta", "gamma")}
    text = with_keys(THREE_HOSTS, pairs).replace("::1", "127.0.0.3").replace(old, new)
    file, key = write_cluster_file(tmp_path, text), tmp_path / "host.key"
    if name in pairs:
        write_key_file(key, pairs[name], Holder(HolderKind.HOST, name))
    assert problem in _refusal(["host", name, "--cluster", str(file), "--key", str(key)], capsys)


def test_a_share_runs_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A second start of a host's share is found by its ports, before it loads a model."""
    first = free_ports(3, ["127.0.0.1", "127.0.0.2"])
    text = THREE_HOSTS.replace("7000", str(first)).replace("7100", str(first + 1))
    file = write_cluster_file(tmp_path, text)
    with socket.create_server(("127.0.0.1", first)):
        refusal = _refusal(["host", "alpha", "--cluster", str(file)], capsys)
    assert f"port {first} on 127.0.0.1 is in use; choose another with coordinator_port" in refusal
    with socket.create_server(("127.0.0.2", first + 2)):
        refusal = _refusal(["host", "beta", "--cluster", str(file)], capsys)
    assert f"port {first + 2} on 127.0.0.2 is in use; choose another with kv_port" in refusal


def test_a_share_that_runs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A second start says that the host runs already, and in which runtime folder, instead of which port is in use. A
    host of the same name in another cluster, and a share that has ended, do not count.
    """
    first = free_ports(2, ["127.0.0.1"])
    text = THREE_HOSTS.replace("7000", str(first)).replace("gateways = 1\n", "")
    with tempfile.TemporaryDirectory(prefix="as-") as short:
        file, folder = write_cluster_file(Path(short), text), Path(short) / "run"
        start = ["host", "alpha", "--cluster", str(file)]
        assert main([*start, "--prepare", str(folder)]) == 0
        assert folder_of_host(ClusterSettings(runtime_dir=folder), "lab", "alpha") is None
        kept = (folder / HOST).read_text(encoding="utf-8")
        with runtime_folder(ClusterSettings(runtime_dir=folder)), socket.create_server(("127.0.0.1", first)):
            (folder / HOST).write_text(kept, encoding="utf-8")
            refusal = _refusal([*start, "--runtime-dir", str(folder)], capsys)
            assert refusal == f"actorserve: host alpha runs already on this machine, with the runtime folder {folder}\n"
            file.write_text(text.replace('"lab"', '"other"'), encoding="utf-8")
            assert f"port {first} on 127.0.0.1" in _refusal([*start, "--runtime-dir", str(folder)], capsys)


def test_a_share_in_a_fresh_folder_is_found() -> None:
    """Without a runtime folder in the settings, a share is found among the fresh folders of this user."""
    with runtime_folder(ClusterSettings()) as folder:
        (folder / HOST).write_text(host_text("lab-of-a-test", "alpha"), encoding="utf-8")
        assert folder_of_host(ClusterSettings(), "lab-of-a-test", "alpha") == folder
        assert folder_of_host(ClusterSettings(), "lab-of-a-test", "beta") is None


def test_scaling_by_processes_is_for_one_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A coordinator cannot start processes on other hosts, so this kind of scaling is refused for clusters."""
    settings = tmp_path / "settings.toml"
    settings.write_text("[http]\nport = 0\n[scaling]\nmax_workers = 4\n", encoding="utf-8")
    file = write_cluster_file(tmp_path)
    refusal = _refusal(["host", "beta", "--cluster", str(file), "--config", str(settings)], capsys)
    assert 'scaling.start_with is "processes"' in refusal
