"""The calls of Llama 3."""

from collections.abc import Collection

from actorserve.http.chat.text_reader import Reading
from actorserve.http.chat.tools.call_form import CallForm, Functions
from actorserve.http.chat.tools.call_reader import CallReader

BEGIN = "<|python_tag|>"


class Llama3Calls(CallReader):
    """``{"name": NAME, "parameters": OBJECT}``, alone or behind ``<|python_tag|>``; semicolons separate several.

    Without the marker, an answer in JSON looks like a call. So an object counts only at the beginning of the text, and
    only if it names one of the request's functions.
    """

    def __init__(self, functions: Functions) -> None:
        self._names = frozenset(functions)
        super().__init__()

    def _read_calls(self) -> Reading[None]:
        if (yield from self._peek()) == "{":
            yield from self._objects(self._names)
        while (yield from self._text_until(BEGIN)):
            yield from self._objects(None)

    def _objects(self, known_names: Collection[str] | None) -> Reading[None]:
        """Read one or several calls."""
        while (yield from self._object(known_names)):
            known_names = self._names
            if (yield from self._peek()) == ";":
                self._hold(1)


LLAMA3 = CallForm(
    markers=(BEGIN,),
    new_reader=Llama3Calls,
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator="; ",
)
