"""Names the known word that a misspelt one is nearest to."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def unknown(known: Iterable[str], given: str) -> str:
    """What to say of ``given``, which is none of the ``known`` words: ``unknown; did you mean "x"?``."""
    words = list(known)
    found = nearest(words, given)
    if found is not None:
        return f'unknown; did you mean "{found}"?'
    return f"unknown; known: {', '.join(words)}" if words else "unknown"


def nearest(known: Sequence[str], given: str) -> str | None:
    """The known word that ``given`` is nearest to; None if none is near."""
    found = get_close_matches(given, known, n=1, cutoff=0.5)
    return found[0] if found else None
