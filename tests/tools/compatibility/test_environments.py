"""Environments are installed once, and again when their versions change."""

from pathlib import Path

import pytest

from tools.compatibility import environments
from tools.compatibility.environments import PythonEnvironment


def test_an_environment_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start installs nothing, other pins do, and so does an interrupted installation."""
    monkeypatch.setattr(environments, "PINS", tmp_path)
    monkeypatch.setattr(environments, "INSTALLED", tmp_path / "installed")
    commands: list[str] = []

    def run(command: list[str]) -> str:
        commands.append(command[-2] if "--requirement" in command else command[-1])
        return ""

    monkeypatch.setattr(environments, "_run", run)
    (tmp_path / "sdk.txt").write_text("openai==1\n", "utf-8")
    sdk = PythonEnvironment("sdk")
    once = [str(sdk.folder), "--requirement"]
    sdk.install()
    sdk.install()
    assert commands == once
    (tmp_path / "sdk.txt").write_text("openai==2\n", "utf-8")
    sdk.install()
    assert commands == once * 2
    (sdk.folder / "installed.stamp").unlink()
    sdk.install()
    assert commands == once * 3
