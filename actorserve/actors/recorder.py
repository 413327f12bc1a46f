"""Records a core's inputs and effects, so that a failure can be replayed (``wire.journal``)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from actorserve.core.effects import Effect
from actorserve.core.messages import Peer
from actorserve.core.recipes import Recipe
from actorserve.errors import SettingsError
from actorserve.wire.journal import Entry, write_effects, write_entry, write_recipe
from actorserve.wire.recipes import recipe_text


class Recorder(Protocol):
    """Gets every input of one core, and then the effects of that input."""

    def heard(self, entry: Entry) -> None:
        """The core is about to get this input."""
        ...

    def decided(self, effects: Sequence[Effect]) -> None:
        """The core has returned these effects for the last input. None of them has been performed yet."""
        ...


class JournalRecorder:
    """Writes a journal. ``recipe`` is what the core was made from; without it the journal cannot be replayed."""

    def __init__(self, file: BinaryIO, recipe: Recipe | None) -> None:
        self._file = file
        if recipe is not None:
            write_recipe(file, recipe_text(recipe))

    def heard(self, entry: Entry) -> None:
        write_entry(self._file, entry)

    def decided(self, effects: Sequence[Effect]) -> None:
        write_effects(self._file, effects)


def open_journal(folder: Path, me: Peer) -> BinaryIO:
    """A new journal file of this incarnation. It is unbuffered, so after a kill it holds all inputs of the core.

    Only its owner may read it, because it holds prompts and the key of the worker's tickets.

    Raises: SettingsError when the folder belongs to another user; OSError when the file exists or cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise SettingsError(f"the journal folder {folder} belongs to another user; choose another cluster.journal_dir")
    file = folder / f"{me.name.replace('/', '.')}-{me.incarnation}.journal"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(file, flags, 0o600), "wb", buffering=0)
