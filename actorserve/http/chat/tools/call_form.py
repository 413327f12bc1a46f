"""How a family of models writes tool calls: what its prompts, its grammar and its parser have in common."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from actorserve.http.chat.tools.call_reader import CallReader

Functions = Mapping[str, Mapping[str, object] | None]
"""The JSON schema of the arguments of each function, by its name; None: no arguments."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form of tool calls, as the text around names and arguments.

    A model's calls are ``opening``, then the calls with ``separator`` between them, then ``closing``. A call is
    ``before_name``, its name, ``before_arguments``, its arguments in JSON, and ``after_arguments``.
    """

    markers: tuple[str, ...]
    """What a model's vocabulary may have as special tokens."""
    new_reader: Callable[[Functions], CallReader]
    """Makes a parser of this form for a request with these functions."""
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str = "\n"
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    """What every call, or list of calls, in a text begins with; empty if the parser also finds calls without it."""

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """The calls, given as names and arguments, as a model writes them."""
        texts = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
            for name, arguments in calls
        )
        return f"{self.opening}{self.separator.join(texts)}{self.closing}"
