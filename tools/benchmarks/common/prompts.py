"""Seeded prompts of a given length, as token ids or as text."""

import random

_WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "that", "with", "as", "on", "at", "by", "from", "his", "her"),
    *("they", "we", "you", "it", "are", "this", "have", "not", "but", "had", "one", "all", "were", "when", "who"),
    *("will", "more", "no", "if", "out", "so", "what", "up", "about", "into", "than", "them", "can", "only", "other"),
    *("time", "new", "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over"),
)


def prompt_token_ids(count: int, id_range: tuple[int, int], rng: random.Random) -> list[int]:
    """Token ids from the half-open range."""
    return [rng.randrange(*id_range) for _ in range(count)]


def prompt_text(count: int, rng: random.Random) -> str:
    """About ``count`` tokens of text: words that are one token each in most tokenizers."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))
