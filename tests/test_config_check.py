"""``actorserve config check``: mistakes of all files, a line each, and the exit status."""

from pathlib import Path

import pytest

from actorserve.cli import main
from actorserve.wire.curve.key_files import make_key_pair, write_key_file
from actorserve.wire.trust import Holder, HolderKind
from tests.cluster.files import with_keys, write_cluster_file

CONFIG = Path(__file__).resolve().parent.parent / "config"


def test_right_files_end_with_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Files without mistakes are reported as ok, a line each."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text((CONFIG / "cluster.toml").read_text("utf-8").replace("gamma.example.net", "localhost"), "utf-8")
    settings = str(CONFIG / "actorserve.toml")
    assert main(["config", "check", settings, str(cluster)]) == 0
    assert capsys.readouterr().out == f"{settings}: ok\n{cluster}: ok\n"


def test_mistakes_end_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every mistake of every file has a line; an unknown name comes with the nearest one."""
    settings, cluster = tmp_path / "a.toml", tmp_path / "c.toml"
    settings.write_text("[http]\nprot = 1\n[wrokers]\ncount = 1\n[workers]\ncuont = 1\n", "utf-8")
    cluster.write_text('id = "lab"\ncoordinators = ["alpha"]\n[[host]]\nname = "beta"\n', "utf-8")
    assert main(["config", "check", str(settings), str(cluster), "/nowhere.toml"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for line in (
        f'{settings}: http.prot: unknown; did you mean "port"?',
        f'{settings}: wrokers: unknown; did you mean "workers"?',
        f'{settings}: workers.cuont: unknown; did you mean "count"?',
        f"{cluster}: host beta: address: missing",
        f"{cluster}: no host has workers",
    ):
        assert line in lines
    assert lines[-1].startswith("/nowhere.toml: cannot read settings from /nowhere.toml")


def test_settings_are_checked_against_the_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Settings that are right for one host may be wrong for a cluster: their ports clash, or they start processes."""
    settings, cluster = tmp_path / "a.toml", tmp_path / "c.toml"
    settings.write_text("[http]\nport = 7491\n[scaling]\nmax_workers = 4\n", "utf-8")
    host = '[[host]]\nname = "beta"\naddress = "127.0.0.1"\ngateways = 1\nworkers = 2\n'
    cluster.write_text(f'id = "lab"\ncoordinators = ["beta"]\n{host}', "utf-8")
    assert main(["config", "check", str(settings)]) == 0
    assert main(["config", "check", str(settings), str(cluster)]) == 1
    said = capsys.readouterr().out
    assert f"{settings}: http.port is 7491, which is a port of KV on host beta" in said
    assert f'{settings}: scaling.start_with is "processes"' in said
    settings.write_text("[http]\nport = 7480\n", "utf-8")
    assert main(["config", "check", str(cluster), str(settings)]) == 1
    assert "http.port is 7480, which is the coordinator's port on host beta" in capsys.readouterr().out
    settings.write_text("[http]\nport = 7481\n", "utf-8")
    assert main(["config", "check", str(cluster), str(settings)]) == 1
    assert "http.port is 7481, which is the port of consoles on host beta" in capsys.readouterr().out


def test_a_name_that_cannot_be_looked_up_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An address that is a name must be known to this machine's resolver."""
    cluster = tmp_path / "c.toml"
    host = '[[host]]\nname = "beta"\naddress = "no-such-host.invalid"\ngateways = 1\nworkers = 1\n'
    cluster.write_text(f'id = "lab"\ncoordinators = ["beta"]\n{host}', "utf-8")
    assert main(["config", "check", str(cluster)]) == 1
    assert "host beta: address no-such-host.invalid cannot be looked up" in capsys.readouterr().out


TWO_HOSTS = """
id = "lab"
coordinators = ["alpha"]
[[host]]
name = "alpha"
address = "10.0.0.1"
gateways = 1
[[host]]
name = "beta"
address = "10.0.0.2"
workers = 1
"""


@pytest.mark.parametrize(
    ("keys_of", "more", "problem"),
    [
        ((), "", "host alpha listens at 10.0.0.1, where other machines can connect, so every host needs a public_key"),
        (("alpha",), "", "host beta has no public_key, which every host needs if there are keys: `actorserve keys --"),
        ((), '[operators]\nann = "{alpha}"', "host beta has no public_key"),
        (("alpha", "beta"), '[operators]\nann = "{alpha}"', "host alpha and operator ann have the same public key"),
        (("alpha", "beta"), '[viewers]\nbeta = "{ann}"', "host beta and viewer beta have the same name"),
        (("alpha", "beta"), f'[viewers]\neve = "{"#" * 40}"', "the public key of viewer eve is not a key"),
        (("alpha", "beta"), "", ""),
    ],
)
def test_mistakes_of_keys_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys_of: tuple[str, ...], more: str, problem: str
) -> None:
    """Keys that are missing, doubled, malformed or needed are found before anything starts."""
    pairs = {name: make_key_pair() for name in ("alpha", "beta", "ann")}
    text = with_keys(TWO_HOSTS, {name: pairs[name] for name in keys_of})
    for name, pair in pairs.items():
        more = more.replace(f"{{{name}}}", pair.public_key)
    file = write_cluster_file(tmp_path, f"{text}\n{more}\n")
    assert main(["config", "check", str(file)]) == (1 if problem else 0)
    assert f"{file}: {problem or 'ok'}" in capsys.readouterr().out


def test_a_secret_key_of_no_host_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The secret key on this host has to belong to a host of the cluster, and only its owner may read it."""
    pairs = {name: make_key_pair() for name in ("alpha", "beta")}
    stranger = make_key_pair()
    file = write_cluster_file(tmp_path, with_keys(TWO_HOSTS, pairs))
    for name, pair in (*pairs.items(), ("stranger", stranger)):
        write_key_file(tmp_path / f"{name}.key", pair, Holder(HolderKind.HOST, name))
    assert main(["config", "check", str(file), "--key", str(tmp_path / "beta.key")]) == 0
    assert main(["config", "check", str(file), "--key", str(tmp_path / "stranger.key")]) == 1
    assert f"belongs to no host of the cluster: its public key is {stranger.public_key}" in capsys.readouterr().out
    (tmp_path / "beta.key").chmod(0o644)
    assert main(["config", "check", str(file), "--key", str(tmp_path / "beta.key")]) == 1
    assert "others may read or write the key file" in capsys.readouterr().out


def test_a_key_in_the_usual_place_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped keys of two hosts are found where hosts look for their own."""
    monkeypatch.setattr("actorserve.programs.keys._HOST_KEYS", tmp_path)
    pairs = {name: make_key_pair() for name in ("alpha", "beta")}
    file = write_cluster_file(tmp_path, with_keys(TWO_HOSTS, pairs))
    write_key_file(tmp_path / "alpha.key", pairs["beta"], Holder(HolderKind.HOST, "alpha"))
    assert main(["config", "check", str(file)]) == 1
    assert f"the secret key in {tmp_path / 'alpha.key'} belongs to host beta" in capsys.readouterr().out


def test_no_file_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files, and without the usual ones, the exit status is 2."""
    monkeypatch.setattr("actorserve.commands.USUAL_FILES", (Path("/nowhere/a.toml"),))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check"])
    assert ended.value.code == 2
    assert "/nowhere/a.toml" in capsys.readouterr().err
