"""``actorserve keys``: the secret goes to a file, and what is printed goes into the cluster's file as it is."""

import tomllib
from pathlib import Path

import pytest

from actorserve.cli import main
from actorserve.cluster.file import parse_cluster
from actorserve.cluster.keys import public_keys
from actorserve.wire.curve.key_files import read_key_file
from actorserve.wire.trust import Holder, HolderKind


@pytest.fixture(autouse=True)
def _usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorserve.programs.keys._HOST_KEYS", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("arguments", "file", "entry"),
    [
        (("--host", "alpha"), "etc/alpha.key", "public_key"),
        (("--actuator", "alpha"), "etc/alpha.actuator", "actuator_key"),
        (("--operator", "anna"), "home/actorserve/anna.key", "anna"),
        (("--viewer", "grafana.lab"), "home/actorserve/grafana.lab.key", "grafana.lab"),
        (("--host", "beta", "--out", "{tmp}/mine"), "mine", "public_key"),
    ],
)
def test_a_pair_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], file: str, entry: str
) -> None:
    """The secret key lies in the usual or the given file; the printed line is TOML with the public key alone."""
    assert main(["keys", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == 0
    said = capsys.readouterr().out
    pair = read_key_file(tmp_path / file)
    assert tomllib.loads(said) == {entry: pair.public_key}
    assert pair.secret_key not in said
    assert str(tmp_path / file) in said


def test_printed_lines_make_a_cluster_with_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The lines of a host, its actuator and an operator, put together, are a file that knows their holders."""
    lines = {}
    for kind, name in (("host", "alpha"), ("actuator", "alpha"), ("operator", "anna")):
        main(["keys", f"--{kind}", name])
        lines[kind] = capsys.readouterr().out
    table = f'[[host]]\nname = "alpha"\naddress = "10.0.0.1"\ngateways = 1\nworkers = 1\n{lines["host"]}'
    text = f'id = "x"\ncoordinators = ["alpha"]\n{table}{lines["actuator"]}[operators]\n{lines["operator"]}'
    keys = public_keys(parse_cluster(text, tmp_path))
    assert keys is not None
    assert set(keys.holders().values()) == {
        Holder(HolderKind.HOST, "alpha"),
        Holder(HolderKind.ACTUATOR, "alpha"),
        Holder(HolderKind.OPERATOR, "anna"),
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--host", "a/b"), "'a/b' cannot be a name"),
        (("--operator", "../anna"), "cannot be a name"),
        (("--host", "alpha", "--out", "/proc/none/alpha.key"), "cannot write the key file"),
    ],
)
def test_a_wrong_name_or_place_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    """Nothing is written."""
    assert main(["keys", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert problem in said.err


def test_a_second_key_in_the_same_place_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first one stays as it was."""
    assert main(["keys", "--host", "alpha"]) == 0
    before = read_key_file(tmp_path / "etc/alpha.key")
    assert main(["keys", "--host", "alpha"]) == 1
    assert "a key is never overwritten" in capsys.readouterr().err
    assert read_key_file(tmp_path / "etc/alpha.key") == before
