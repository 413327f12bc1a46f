"""Messages: time, and how processes start and end."""

from actorserve.core.messages.value import value


@value
class StartFailed:
    """Local: a worker that was ordered will not start. Failures may go unreported, so a timeout applies as well."""


@value
class Tick:
    """Local: the deadline that ``next_deadline`` named has come."""


@value
class Drain:
    """c -> w, or local: take no new requests, finish those that run or move them elsewhere, and end."""
