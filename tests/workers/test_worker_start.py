"""How a worker's process starts."""

import gc
from typing import Any

import pytest

from workers import worker


def test_a_worker_serves_without_searching_what_it_loaded_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker begins to serve, garbage is collected again, and what was loaded is left out."""
    states: list[tuple[bool, bool]] = []

    def nothing(*_: object) -> None:
        """Instead of loading a model."""

    def serve(_: Any) -> None:
        states.append((gc.isenabled(), gc.get_freeze_count() > num_before))

    for name in ("load_engine", "_pool_watch", "profile_of", "_run"):
        monkeypatch.setattr(worker, name, nothing)
    monkeypatch.setattr("uvloop.run", serve)
    num_before = gc.get_freeze_count()
    gc.disable()
    try:
        worker.main(_Child())  # type: ignore[arg-type]
    finally:
        gc.enable()
        gc.unfreeze()
    assert states == [(True, True)]


class _Child:
    """As much of a ``Child`` as is asked for before the worker serves."""

    settings = None
    status = None
