"""A cluster's file of three hosts on loopback, for tests."""

from pathlib import Path

from actorserve.cluster.file import ClusterFile, read_cluster_file

THREE_HOSTS = """
id = "lab"
coordinators = ["alpha"]
coordinator_port = 7000
kv_port = 7100
[[host]]
name = "alpha"
address = "127.0.0.1"
gateways = 1
[[host]]
name = "beta"
address = "127.0.0.2"
bind = "0.0.0.0"
gateways = 2
workers = 2
[[host]]
name = "gamma"
address = "::1"
workers = 1
"""


def write_cluster_file(folder: Path, text: str = THREE_HOSTS) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return file


def three_hosts(folder: Path) -> ClusterFile:
    return read_cluster_file(write_cluster_file(folder))
