"""The calls of Mistral's models."""

import re
import secrets
import string

from actorserve.http.chat.text_reader import Reading
from actorserve.http.chat.tools.call_form import CallForm
from actorserve.http.chat.tools.call_reader import CallReader

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*(?=\{)")
_MAX_HEAD_CHARS = 256
_ID_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 9


class MistralCalls(CallReader):
    """``[TOOL_CALLS][{"name": NAME, "arguments": OBJECT}, ...]``, or ``[TOOL_CALLS]NAME[ARGS]OBJECT`` for each call.

    Newer models may also write ``[CALL_ID]ID`` behind the name.
    """

    def _make_id(self) -> str:
        """A fresh id as Mistral's templates demand it."""
        return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))

    def _read_calls(self) -> Reading[None]:
        while (yield from self._text_until(BEGIN)):
            if (yield from self._peek()) == "[":
                yield from self._list()
            else:
                yield from self._named()

    def _list(self) -> Reading[None]:
        self._hold(1)
        while (yield from self._object()):
            if (yield from self._peek()) != ",":
                if self._unread.startswith("]"):
                    self._unread = self._unread[1:]
                return
            self._hold(1)

    def _named(self) -> Reading[None]:
        while True:
            head = _HEAD.match(self._unread, 0, _MAX_HEAD_CHARS)
            if head is not None:
                self._unread = self._unread[head.end() :]
                yield from self._arguments(head[1], head[2] or "")
                return
            if len(self._unread) >= _MAX_HEAD_CHARS or not (yield from self._more()):
                return


MISTRAL_LIST = CallForm(
    markers=(BEGIN,),
    new_reader=lambda functions: MistralCalls(),
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    opening=f"{BEGIN}[",
    closing="]",
    trigger=BEGIN,
)
"""The form until the tokenizer's version 7."""

MISTRAL_NAMED = CallForm(
    markers=(BEGIN, CALL_ID, ARGUMENTS),
    new_reader=lambda functions: MistralCalls(),
    before_name=BEGIN,
    before_arguments=ARGUMENTS,
    after_arguments="",
    separator="",
    trigger=BEGIN,
)
"""The form since the tokenizer's version 11."""
