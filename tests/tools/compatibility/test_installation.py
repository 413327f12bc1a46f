"""What happens to the checks of clients that cannot be installed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.compatibility.__main__ import EXIT_UNUSABLE, main
from tools.compatibility.clients import CLIENTS, Client
from tools.compatibility.errors import CompatibilityError, MissingProgramError


class Unusable:
    """An environment whose installation fails, and counts how often it was tried."""

    name = "unusable"

    def __init__(self, error: CompatibilityError) -> None:
        self._error = error
        self.num_tries = 0

    def install(self) -> None:
        self.num_tries += 1
        raise self._error

    def version(self, package: str) -> str:
        raise AssertionError(package)

    def command(self, checks: Sequence[Path], report: Path) -> list[str]:
        raise AssertionError(checks, report)


def offer(monkeypatch: pytest.MonkeyPatch, environment: Unusable) -> None:
    """Let there be two clients of this environment."""
    for name in ("one", "other"):
        monkeypatch.setitem(CLIENTS, name, Client(environment, name, ()))


def test_nothing_can_be_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without any client nothing was checked, which is an error with the reason, and an environment is tried once."""
    environment = Unusable(CompatibilityError("pip failed: no route"))
    offer(monkeypatch, environment)
    assert main(["one", "other"]) == EXIT_UNUSABLE
    assert capsys.readouterr().err == "clients: no client can be installed: pip failed: no route\n"
    assert environment.num_tries == 1


def test_a_program_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that lacks a program its clients are skipped, with the reason."""
    offer(monkeypatch, Unusable(MissingProgramError("node is not installed")))
    assert main(["one", "other"]) == 0
    assert "one: all: skipped: node is not installed" in capsys.readouterr().out
