"""Messages: time, and how processes start and end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Local: a worker that was ordered will not start. Failures may go unreported, so a timeout applies as well."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Local: the deadline that ``next_deadline`` named has come."""


@dataclass(frozen=True, slots=True)
class Drain:
    """c -> w, or local: take no new requests, finish those that run or move them elsewhere, and end."""
