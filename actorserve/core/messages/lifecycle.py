"""Messages: time, starting and ending."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Local: a worker that was to be started will not come. Not each that fails is known, so waiting has its bounds."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Local: the deadline that ``next_deadline`` named has come."""


@dataclass(frozen=True, slots=True)
class Drain:
    """c -> w, or local: finish what runs or move it elsewhere, take nothing new, and end."""
