"""Names the known word that a misspelt one is nearest to."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(known: Iterable[str], given: str) -> str:
    """What to say of ``given``, which is none of the ``known`` words: ``unknown; did you mean "x"?``."""
    words = list(known)
    found = get_close_matches(given, words, n=1, cutoff=0.5)
    if found:
        return f'unknown; did you mean "{found[0]}"?'
    return f"unknown; known: {', '.join(words)}" if words else "unknown"
