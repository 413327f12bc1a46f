"""Keeps a client's text from spelling control tokens: only the template writes them.

A template joins its own text and the client's text, and ``<|im_end|>`` in a message would end the message. So, before
the template runs, a marker character is put into each string that could become a control token or a part of one. In
the rendered text, the control tokens without a marker are the template's: they get their aliases, which no client can
know (``model_files.control_aliases``), and the markers are taken out again.
"""

import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_MARKER = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))
"""Characters for private use. Clients do not know them, and so do not send them."""
_ESCAPED_MARKER = json.dumps(_MARKER)[1:-1]
"""What the filter ``tojson(ensure_ascii=true)`` makes of the marker."""
_STEP_CHARS = 2**12
"""How much of a text is searched at once. A search holds Python's lock, so other threads wait for each step."""
_NAME = re.compile(r"\W+(\w+)\W+")
_OWN_WORDS = frozenset(
    [
        "system",
        "user",
        "assistant",
        "tool",
        "function",
        "ipython",
        "messages",
        "role",
        "content",
        "name",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "arguments",
        "tools",
        "documents",
        "description",
        "parameters",
        "properties",
        "required",
        "items",
        "enum",
        "default",
        "anyOf",
        "object",
        "string",
        "number",
        "integer",
        "boolean",
        "array",
        "null",
    ]
)
"""Words of chat messages and JSON schemas. Templates compare them or look them up, so they are not marked."""
_WORD = re.compile(r"\w*")


class ControlTokens:
    """Marks and finds the texts of control tokens. ``aliases`` are their names in the tokenizer's copy."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        texts = list(filter(None, aliases))
        self._aliases = dict(aliases)
        self._anywhere = re.compile(_longest_of(texts) if texts else r"(?!)")
        self._first_char = _any_of(text[0] for text in texts)
        self._last_char = _any_of(text[-1] for text in texts)
        self._prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in texts for start in range(1, len(text))}
        self._names = {name[1] for text in texts if (name := _NAME.fullmatch(text))} - _OWN_WORDS
        self._texts = "\0".join(texts)
        self._longest = max(map(len, texts), default=0)

    def mark(self, context: Mapping[str, Any]) -> dict[str, Any] | None:
        """A copy of ``context`` whose strings no template can join to a control token. None if no string could become
        part of one, so that nothing has to be marked.
        """
        if not any(map(self._is_dangerous, _strings(context))):
            return None
        marked: dict[str, Any] = self._marked(context)
        return marked

    def with_aliases(self, text: str) -> str:
        """The rendered text without its markers, and with aliases where the template wrote control tokens."""
        pieces, end = [], 0
        for start, token in self._find(text):
            pieces += [text[end:start], self._aliases[token]]
            end = start + len(token)
        return self.without_markers("".join([*pieces, text[end:]]))

    def without_markers(self, text: str) -> str:
        """The rendered text as people read it."""
        return text.replace(_MARKER, "").replace(_ESCAPED_MARKER, "")

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark_text(value) if self._is_dangerous(value) else value
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def _is_dangerous(self, text: str) -> bool:
        """Whether the text, between any other texts, could complete a control token."""
        if any(self._find(text)):
            return True
        head, tail = text[: self._longest], text[-self._longest :]
        return (
            self._may_precede(tail)
            or self._may_follow(head)
            or (tail[-1:].isspace() and self._may_precede(text.rstrip()))
            or (head[:1].isspace() and self._may_follow(text.lstrip()))
        )

    def _find(self, text: str, *, overlapping: bool = False) -> Iterator[tuple[int, str]]:
        """The places and texts of control tokens, the longest at each place. ``overlapping``: also inside another."""
        at = 0
        while at < len(text):
            end = at + _STEP_CHARS
            found = self._anywhere.search(text, at, end + self._longest)
            if found is None or found.start() >= end:
                at = end
            else:
                yield found.start(), found[0]
                at = found.start() + 1 if overlapping else found.end()

    def _may_precede(self, text: str) -> bool:
        """Whether the text ends with the beginning of a control token."""
        tail = text[-self._longest :]
        return any(tail[place.start() :] in self._prefixes for place in self._first_char.finditer(tail))

    def _may_follow(self, text: str) -> bool:
        """Whether the text begins with the end of a control token, or is a middle part of one.

        A single word counts only if it is the whole name of a control token (``s`` of ``<s>``), and not a word that
        templates compare or look up, such as a role.
        """
        head = text[: self._longest]
        word = head.rstrip()
        if _WORD.fullmatch(word):
            return word in self._names
        ends = (head[: place.end()] for place in self._last_char.finditer(head))
        return any(end in self._suffixes for end in ends) or (len(text) < self._longest and text in self._texts)

    def _mark_text(self, text: str) -> str:
        places = [start + 1 for start, _ in self._find(text, overlapping=True)]
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())  # templates strip white space
        places += [place for place in (0, start) if self._may_follow(text[place:])]
        places += [place for place in (end, len(text)) if self._may_precede(text[:place])]
        cuts = [0, *dict.fromkeys(sorted(places)), len(text)]
        return _MARKER.join(text[begin:stop] for begin, stop in itertools.pairwise(cuts))


def _longest_of(texts: Collection[str]) -> str:
    """A pattern for the longest of the texts. It reads their common beginnings once, so that it fails quickly."""
    first, last = min(texts), max(texts)
    num_common = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    prefix = re.escape(first[:num_common])
    ends: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > num_common:
            ends.setdefault(text[num_common], []).append(text[num_common:])
    if not ends:
        return prefix
    return f"{prefix}(?:{'|'.join(map(_longest_of, ends.values()))}){'?' if len(first) == num_common else ''}"


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(set(characters)))) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
