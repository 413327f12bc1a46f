"""How a console finds the server on its host, and its command as a whole."""

import socket
from pathlib import Path

import pytest

from actorserve import cli
from actorserve.console.find import NoServerError, find_address
from actorserve.processes.child import write_settings
from actorserve.processes.runtime_folder import HOST, SETTINGS, host_text
from actorserve.settings import HttpSettings, ModelSettings, Settings


def serve_in(folder: Path) -> socket.socket:
    folder.mkdir(mode=0o700, exist_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "console.sock"))
    listening.listen()
    return listening


def test_the_only_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is an error, one is found, several must be chosen from, and folders that others may enter do not count."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(NoServerError, match="no server of yours"):
        find_address(None)
    with serve_in(tmp_path / "actorserve-a"):
        open_to_all = tmp_path / "actorserve-open"
        with serve_in(open_to_all):
            open_to_all.chmod(0o755)
            assert find_address(None) == f"ipc://{tmp_path}/actorserve-a/console.sock"
        with serve_in(tmp_path / "actorserve-b"), pytest.raises(NoServerError, match=r"several .*actorserve-a.*-b"):
            find_address(None)


def test_several_servers_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the option that chooses a server, with the host that it runs, or with its model and port. A folder
    that does not tell stands alone.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alone, share, silent = (tmp_path / f"actorserve-{name}" for name in "abc")
    with serve_in(alone), serve_in(share), serve_in(silent):
        settings = Settings(http=HttpSettings(port=8001), model=ModelSettings(name="a-model"))
        write_settings(settings, alone / SETTINGS)
        write_settings(settings, share / SETTINGS)
        (share / HOST).write_text(host_text("lab", "alpha"), encoding="utf-8")
        with pytest.raises(NoServerError) as caught:
            find_address(None)
    assert str(caught.value) == (
        f"several servers run on this host; choose one: --runtime-dir {alone} (a-model on port 8001) or "
        f"--runtime-dir {share} (host alpha of cluster lab) or --runtime-dir {silent}"
    )


def test_a_killed_server_is_not_chosen_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's file that it has left behind hides no server that runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve_in(tmp_path / "actorserve-a").close()
    with serve_in(tmp_path / "actorserve-b"):
        assert find_address(None) == f"ipc://{tmp_path}/actorserve-b/console.sock"


def test_the_server_that_systemd_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may enter the units' folder needs no option; for another user it does not count."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("actorserve.console.find.UNITS_FOLDER", tmp_path / "run")
    with serve_in(tmp_path / "run"):
        assert find_address(None) == f"ipc://{tmp_path}/run/console.sock"
    monkeypatch.setattr(Path, "is_socket", denied)
    with pytest.raises(NoServerError, match="no server of yours"):
        find_address(None)


def denied(folder: Path) -> bool:
    raise PermissionError(folder)


def test_a_folder_without_a_server_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 3, as it does when nobody answers."""
    assert cli.main(["console", "--runtime-dir", str(tmp_path), "status"]) == 3
    assert capsys.readouterr().err == f"actorserve console: no server has its sockets in {tmp_path}\n"
    with serve_in(tmp_path):
        assert cli.main(["console", "--runtime-dir", str(tmp_path), "--timeout", "0.1", "status"]) == 3
    assert "no answer from ipc://" in capsys.readouterr().err
