"""A process's trust follows the keys in the cluster's file, and a file that is wrong changes nothing."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from actorserve.actors.cluster_trust import open_trust
from actorserve.core.messages import Role
from actorserve.errors import SettingsError
from actorserve.processes.child import Child
from actorserve.processes.status import Reporter
from actorserve.settings import Settings
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import UNKNOWN_KEY, Holder, HolderKind, Trust, TrustError
from tests.cluster.files import THREE_HOSTS, with_keys

PAIRS = {name: make_key_pair() for name in ("alpha", "beta", "gamma")}
ANN = make_key_pair()
TEXT = with_keys(THREE_HOSTS, PAIRS)
WITHOUT_BETA = TEXT.replace(TEXT[TEXT.index('[[host]]\nname = "beta"') : TEXT.index('[[host]]\nname = "gamma"')], "")


class Host:
    """Host alpha's files, and processes that start there."""

    def __init__(self, folder: Path) -> None:
        self.source, self.runtime_dir = folder / "etc.toml", folder / "run"
        self.runtime_dir.mkdir()
        self.copy = self.runtime_dir / "cluster.toml"
        self.key_file = folder / "alpha.key"
        write_key_file(self.key_file, PAIRS["alpha"], Holder(HolderKind.HOST, "alpha"))
        self.source.write_text(TEXT)
        self.copy.write_text(TEXT)

    def child(self) -> Child:
        return Child(
            "alpha/gateway-0",
            Settings(),
            self.runtime_dir,
            Reporter(None),
            cluster_file=self.copy,
            host="alpha",
            cluster_source=self.source,
            key_file=self.key_file,
        )

    def start(self) -> tuple[Child, Trust]:
        child = self.child()
        trust = open_trust(child)
        assert trust is not None
        return child, trust


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_an_actuator_has_a_key_of_its_own(host: Host, tmp_path: Path) -> None:
    """Alpha's actuator starts with the actuator's key, and not with the key of alpha's other processes."""
    own = make_key_pair()
    host.source.write_text(TEXT.replace('name = "alpha"\n', f'name = "alpha"\nactuator_key = "{own.public_key}"\n', 1))
    child = replace(host.child(), name="alpha/power")
    with pytest.raises(SettingsError, match="belongs to host alpha, and not to actuator alpha"):
        open_trust(child)
    file = tmp_path / "alpha.actuator"
    write_key_file(file, own, Holder(HolderKind.ACTUATOR, "alpha"))
    trust = open_trust(replace(child, key_file=file))
    assert trust is not None
    trust.check_own("alpha/power")


def knows_beta(trust: Trust) -> bool:
    return trust.rights_of(PAIRS["beta"].public_key, "beta/worker-0").refusal is None


def test_roles_follow_from_what_runs_on_a_host(host: Host) -> None:
    """A host may run what the cluster's file says, and only the coordinator's hosts may send as a coordinator."""
    _, trust = host.start()
    assert trust.own == PAIRS["alpha"]
    assert {name: found.roles for name, found in trust.keys.hosts.items()} == {
        "alpha": {Role.COORDINATOR, Role.GATEWAY},
        "beta": {Role.GATEWAY, Role.WORKER},
        "gamma": {Role.WORKER},
    }
    for name in ("coordinator", "alpha/coordinator"):
        assert trust.rights_of(PAIRS["alpha"].public_key, name).refusal is None
        assert trust.rights_of(PAIRS["beta"].public_key, name).refusal is not None
        assert trust.key_of_process(name) == PAIRS["alpha"].public_key


def test_a_removed_and_an_added_key_take_effect_at_a_reload(host: Host) -> None:
    """Without a restart a host is out, and an operator is in."""
    child, trust = host.start()
    assert knows_beta(trust)
    host.source.write_text(f'{WITHOUT_BETA}[operators]\nann = "{ANN.public_key}"\n')
    assert child.reloads.run() == (["keys of the cluster"], [])
    assert trust.rights_of(PAIRS["beta"].public_key, "beta/worker-0").refusal == UNKNOWN_KEY
    assert trust.holder_of(ANN.public_key) == Holder(HolderKind.OPERATOR, "ann")


@pytest.mark.parametrize(
    "wrong",
    [
        TEXT[: len(TEXT) // 2],
        "",
        WITHOUT_BETA.replace('id = "lab"', 'id = "other"'),
        WITHOUT_BETA.replace(PAIRS["alpha"].public_key, ANN.public_key),
        WITHOUT_BETA.replace(PAIRS["gamma"].public_key, PAIRS["alpha"].public_key),
        THREE_HOSTS,
    ],
    ids=["cut off", "empty", "another cluster", "without our key", "one key twice", "without keys"],
)
def test_a_wrong_file_changes_nothing(host: Host, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is one line of the log, which names the file, and the next good file counts."""
    child, trust = host.start()
    before = trust.keys
    host.source.write_text(wrong)
    with caplog.at_level(logging.WARNING):
        assert child.reloads.run() == ([], ["keys of the cluster"])
    assert trust.keys == before
    (line,) = caplog.messages
    assert str(host.source) in line
    host.source.write_text(WITHOUT_BETA)
    assert child.reloads.run() == (["keys of the cluster"], [])
    assert not knows_beta(trust)


def test_a_restart_brings_no_removed_key_back(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """A process that starts again while the file is half written takes the last good keys, and not the first ones."""
    child, _ = host.start()
    host.source.write_text(WITHOUT_BETA)
    child.reloads.run()
    host.source.write_text(TEXT[:100])
    with caplog.at_level(logging.WARNING):
        _, trust = host.start()
    assert not knows_beta(trust)
    assert "the keys are those of the last good file, because of this one" in caplog.text
    assert sorted(file.name for file in host.runtime_dir.iterdir()) == ["cluster.toml", "keys.toml"]


def test_a_process_without_its_hosts_key_does_not_start(host: Host) -> None:
    """A missing key file, and one of another host, are errors."""
    host.key_file.unlink()
    with pytest.raises(TrustError, match="cannot read the key file"):
        open_trust(host.child())
    write_key_file(host.key_file, PAIRS["beta"], Holder(HolderKind.HOST, "beta"))
    with pytest.raises(SettingsError, match="the secret key belongs to host beta, and not to host alpha"):
        open_trust(host.child())


def test_without_keys_there_is_no_trust(tmp_path: Path) -> None:
    """A single host, and hosts on loopback without keys, talk without encryption."""
    assert open_trust(Child("gateway-0", Settings(), tmp_path, Reporter(None))) is None
