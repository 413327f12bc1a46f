"""Folders of tests."""

import tempfile
from pathlib import Path


def make_runtime_folder() -> Path:
    """A fresh folder for sockets, whose path is short: pytest's are too long for some."""
    return Path(tempfile.mkdtemp(prefix="actorserve-"))
