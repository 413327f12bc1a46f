"""A cluster's file of three hosts on loopback, for tests."""

from collections.abc import Mapping
from pathlib import Path

from actorserve.cluster.file import ClusterFile, read_cluster_file
from actorserve.wire.trust import KeyPair

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
bind = "127.0.0.2"
gateways = 2
workers = 2
[[host]]
name = "gamma"
address = "::1"
workers = 1
"""


def with_keys(text: str, pairs: Mapping[str, KeyPair]) -> str:
    """A cluster's file with the public keys of its hosts."""
    for name, pair in pairs.items():
        text = text.replace(f'name = "{name}"', f'name = "{name}"\npublic_key = "{pair.public_key}"')
    return text


def write_cluster_file(folder: Path, text: str = THREE_HOSTS) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return file


def three_hosts(folder: Path) -> ClusterFile:
    return read_cluster_file(write_cluster_file(folder))
