"""``actorserve config check``: mistakes of all files, a line each, and the exit status."""

from pathlib import Path

import pytest

from actorserve.cli import main

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
    host = '[[host]]\nname = "beta"\naddress = "10.0.0.1"\ngateways = 1\nworkers = 2\n'
    cluster.write_text(f'id = "lab"\ncoordinators = ["beta"]\n{host}', "utf-8")
    assert main(["config", "check", str(settings)]) == 0
    assert main(["config", "check", str(settings), str(cluster)]) == 1
    said = capsys.readouterr().out
    assert f"{settings}: http.port is 7491, which is a port of KV on host beta" in said
    assert f'{settings}: scaling.start_with is "processes"' in said
    settings.write_text("[http]\nport = 7480\n", "utf-8")
    assert main(["config", "check", str(cluster), str(settings)]) == 1
    assert "http.port is 7480, which is the coordinator's port on host beta" in capsys.readouterr().out


def test_a_name_that_cannot_be_looked_up_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An address that is a name must be known to this machine's resolver."""
    cluster = tmp_path / "c.toml"
    host = '[[host]]\nname = "beta"\naddress = "no-such-host.invalid"\ngateways = 1\nworkers = 1\n'
    cluster.write_text(f'id = "lab"\ncoordinators = ["beta"]\n{host}', "utf-8")
    assert main(["config", "check", str(cluster)]) == 1
    assert "host beta: address no-such-host.invalid cannot be looked up" in capsys.readouterr().out


def test_no_file_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files, and without the usual ones, the exit status is 2."""
    monkeypatch.setattr("actorserve.cli.USUAL_FILES", (Path("/nowhere/a.toml"),))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check"])
    assert ended.value.code == 2
    assert "/nowhere/a.toml" in capsys.readouterr().err
