"""The exceptions that pass between modules. Expected outcomes are values, not exceptions (``core.messages``)."""

from collections.abc import Sequence
from typing import Final

NOT_TOML: Final = (ValueError, RecursionError)
"""What ``tomllib`` raises for text that is not TOML: it is malformed or no UTF-8, a number has thousands of digits, or
brackets are nested thousands of times.
"""


class ActorserveError(Exception):
    """Base class of all our errors. Its text is one line that tells the user what to do."""


class SettingsError(ActorserveError):
    """A setting is missing, unknown, or out of range. ``problems`` are all mistakes of a file, one a line."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class ModelError(ActorserveError):
    """A model cannot be found, read or served: truncated, unknown architecture, unsafe format."""


class ProfileError(ActorserveError):
    """A profile cannot be read, contradicts itself, or belongs to another model."""


class WorkloadError(ActorserveError):
    """A workload cannot be made: a row of a trace is damaged, or a distribution is unknown."""


class SimulationError(ActorserveError):
    """A simulation's configuration is wrong: a key is missing, unknown, or out of range."""


class ProtocolError(ActorserveError):
    """A frame that no correct peer sends. The receiver counts and drops it, and does not crash."""


class InvalidRequestError(ActorserveError):
    """A client's request is wrong; ``param`` names the wrong field, if there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
