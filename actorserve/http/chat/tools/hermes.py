"""The calls of Hermes, Qwen 2.5 and Qwen 3."""

from actorserve.http.chat.text_reader import Reading
from actorserve.http.chat.tools.call_form import CallForm
from actorserve.http.chat.tools.call_reader import CallReader

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesCalls(CallReader):
    """``<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>``, any number of times, with text before and
    between them. The marker at the end may be missing."""

    def _read_calls(self) -> Reading[None]:
        is_open = False
        while marker := (yield from self._text_until(BEGIN, END)):
            if marker == BEGIN:
                is_open = yield from self._object()
            elif is_open:
                is_open = False
                self._held.clear()


HERMES = CallForm(
    markers=(BEGIN, END),
    new_reader=lambda functions: HermesCalls(),
    before_name=f'{BEGIN}\n{{"name": "',
    before_arguments='", "arguments": ',
    after_arguments=f"}}\n{END}",
    trigger=BEGIN,
)
