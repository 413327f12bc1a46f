"""A mutant: the core with one bug in it, as a small change of one file's text."""

from dataclasses import dataclass
from pathlib import Path

from actorserve.errors import ActorserveError


class MutantError(ActorserveError):
    """A mutant does not fit to the source any more; the text names both."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``name`` says what is wrong then. ``old`` stands exactly once in the file at ``path``, and becomes ``new``.

    ``path`` is relative to the folder of the core. ``why_equivalent`` says why no history can find it, if so.
    """

    name: str
    path: str
    old: str
    new: str
    why_equivalent: str = ""

    def mutate(self, text: str) -> str:
        """The file's text with the bug. Raises: MutantError if ``old`` does not stand there exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise MutantError(
                f"mutant {self.name!r}: expected {self.old!r} once in {self.path}, found it {count} times"
            )
        return text.replace(self.old, self.new)

    def apply(self, core: Path) -> None:
        """Put the bug into the core in this folder. Raises: MutantError."""
        file = core / self.path
        if not file.exists():
            raise MutantError(f"mutant {self.name!r}: there is no file {self.path} in the core any more")
        file.write_text(self.mutate(file.read_text(encoding="utf-8")), encoding="utf-8")
