"""What happened in the cluster lately: numbered lines, of which the oldest are forgotten."""

from collections import deque
from typing import Final, NamedTuple

from actorserve.core.messages import Column
from actorserve.core.operations.tables import integer_column, number_column, text_column

MAX_EVENTS: Final = 1000


class Event(NamedTuple):
    """``now`` in seconds on the shell's clock. ``subject`` is the process or request that it is about."""

    number: int
    now: float
    what: str
    subject: str
    text: str


class EventLog:
    """The last ``MAX_EVENTS`` events. A reader asks for those after the last number that it knows, so it need not be
    waited for.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0

    def add(self, now: float, what: str, subject: str, text: str = "") -> None:
        self._num_events += 1
        self._events.append(Event(self._num_events, now, what, subject, text))

    @property
    def last_number(self) -> int:
        return self._num_events

    def num_missed(self, since: int) -> int:
        """How many events after ``since`` are forgotten already."""
        first = self._events[0].number if self._events else self._num_events + 1
        return max(0, first - 1 - since) if since else 0

    def table(self, since: int, now: float) -> tuple[Column, ...]:
        """The events after number ``since``, the oldest first. A number that never was, as from an earlier process,
        gives all of them.
        """
        after = 0 if since > self._num_events else since
        events = [event for event in self._events if event.number > after]
        return (
            integer_column("number", [event.number for event in events]),
            number_column("ago_s", [now - event.now for event in events]),
            text_column("event", [event.what for event in events]),
            text_column("subject", [event.subject for event in events]),
            text_column("text", [event.text for event in events]),
        )
