"""Files of an operator that no editor wrote: whatever they hold, a command ends with one short printable line."""

import os
from pathlib import Path

import pytest

from actorserve import logs
from actorserve.cli import main
from actorserve.cluster.file import read_cluster_text
from actorserve.errors import ActorserveError
from actorserve.http.access.api_keys import read_api_keys
from actorserve.http.access.tls import Tls
from actorserve.wire.curve.key_files import read_key_file

CLUSTER = """
id = "x"
coordinators = ["alpha"]
coordinator_port = 17480
kv_port = 17490
[[host]]
name = "alpha"
address = "127.0.0.1"
workers = 1
"""
NO_TOML = {
    "bytes": b"\xff\xfe\x00",
    "brackets": b"a = " + b"[" * 5000,
    "digits": b"a = " + b"9" * 5000,
    "half a table": b"[clust",
    "a date": b"a = 2026-99-99",
}
NO_CLUSTER = {
    "an escape sequence": CLUSTER.replace('name = "alpha"', 'name = "al\\u001b[2Jpha"'),
    "a line break": CLUSTER.replace('name = "alpha"', 'name = "al\\nready: pha"'),
    "a long name": CLUSTER.replace('name = "alpha"', f'name = "{"a" * 50_000}"'),
    "many hosts": CLUSTER + "".join(f'[[host]]\nname = "h {number}"\n' for number in range(3000)),
}


def assert_one_line(text: str) -> None:
    assert text.startswith("actorserve: ")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert len(text) < 5000


@pytest.mark.parametrize("name", NO_TOML)
@pytest.mark.parametrize("option", ["--cluster", "--config"])
def test_what_is_no_toml_is_one_line(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the cluster's file, or as settings."""
    file = tmp_path / "file.toml"
    file.write_bytes(NO_TOML[name])
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    files = {"--cluster": str(tmp_path / "cluster.toml")} | {option: str(file)}
    assert main(["host", "alpha", *(word for pair in files.items() for word in pair)]) == 1
    assert_one_line(capsys.readouterr().err)
    assert main(["config", "check", str(file)]) == 1
    checked = capsys.readouterr().out
    assert checked.startswith(f"{file}: ")
    assert checked.count("\n") == 1


@pytest.mark.parametrize("name", NO_CLUSTER)
def test_a_hostile_cluster_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a message repeats of a file cannot move the terminal's cursor, begin a line, or fill the screen."""
    file = tmp_path / "cluster.toml"
    file.write_text(NO_CLUSTER[name])
    assert main(["host", "alpha", "--cluster", str(file)]) == 1
    assert_one_line(capsys.readouterr().err)


@pytest.mark.parametrize("name", NO_TOML)
def test_keys_that_are_no_toml_are_refused(name: str, tmp_path: Path) -> None:
    """A running server that reads such a file again keeps its keys, because the error is an expected one."""
    file = tmp_path / "keys.toml"
    file.write_bytes(NO_TOML[name])
    file.chmod(0o600)
    with pytest.raises(ActorserveError, match="not valid TOML"):
        read_api_keys(file)


@pytest.mark.parametrize("name", NO_TOML)
def test_secret_keys_that_are_no_toml_are_refused(name: str, tmp_path: Path) -> None:
    """A file of a secret key, of which only the first bytes are read."""
    file = tmp_path / "alpha.key"
    file.write_bytes(NO_TOML[name])
    file.chmod(0o600)
    with pytest.raises(ActorserveError, match="is not a key file"):
        read_key_file(file)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge"])
def test_keys_that_are_no_plain_file_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    """A gateway that reads its keys or its certificate again does not wait for a pipe, or read without an end."""
    file = tmp_path / "keys.toml"
    match kind:
        case "pipe":
            os.mkfifo(file, 0o600)
        case "folder":
            file.mkdir(mode=0o700)
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.touch(mode=0o600)
            os.truncate(file, 2**40)
    with pytest.raises(ActorserveError, match=r"cannot read API keys from .*(plain file|MiB|directory)"):
        read_api_keys(file)
    with pytest.raises(ActorserveError, match=r"cannot read the cluster's file .*(plain file|MiB|directory)"):
        read_cluster_text(file)
    plain = tmp_path / "plain.pem"
    plain.touch(mode=0o600)
    for certificate, key in ((file, plain), (plain, file)):
        with pytest.raises(ActorserveError, match=r"cannot read .*(plain file|MiB|directory)"):
            Tls(certificate, key)


def test_a_line_is_printable_and_short() -> None:
    """Line breaks become spaces, other characters that do not print are escaped, and the rest is cut off."""
    assert logs.one_line("a\nb\t c\x1b[2J\u202e") == "a b c\\x1b[2J\\u202e"
    assert logs.one_line("x" * 10_000) == "x" * 4000 + "..."
