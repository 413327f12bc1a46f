"""The help of the console's command, which needs no server."""

from pathlib import Path

import pytest

from actorserve import cli
from actorserve.core.operations.verbs import VERBS


@pytest.fixture(autouse=True)
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_help_stands_where_a_verb_does(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints all verbs, or one of them, and is done."""
    assert cli.main(["console", "help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in VERBS)
    assert cli.main(["console", "help", "migrate"]) == 0
    assert capsys.readouterr().out.startswith("migrate REQUEST WORKER")


def test_help_of_an_unknown_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the nearest verb."""
    assert cli.main(["console", "help", "migrat"]) == 2
    assert capsys.readouterr().err == "actorserve console: there is no verb migrat; did you mean migrate?\n"


def test_the_prompt_takes_no_json_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a verb, --json would change nothing, so it is wrong usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["console", "--json"])
    assert caught.value.code == 2
    assert "--json needs a verb" in capsys.readouterr().err
