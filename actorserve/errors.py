"""The exceptions that cross a module's edge. Expected outcomes are values, not exceptions (``core.messages``)."""


class ActorserveError(Exception):
    """Base of all our errors; its text is one line that a user can act on."""


class SettingsError(ActorserveError):
    """A setting is missing, unknown, or out of range."""


class ModelError(ActorserveError):
    """A model cannot be found, read or served: truncated, unknown architecture, unsafe format."""


class ProfileError(ActorserveError):
    """A profile cannot be read, contradicts itself, or belongs to another model."""


class WorkloadError(ActorserveError):
    """A workload cannot be made: a row of a trace is damaged, or a distribution is unknown."""


class SimulationError(ActorserveError):
    """A simulation's configuration is wrong: a key is missing, unknown, or out of range."""


class ProtocolError(ActorserveError):
    """A frame that no well-behaved peer sends. Counted and dropped, never a crash."""


class InvalidRequestError(ActorserveError):
    """A client's request is wrong; ``param`` names the wrong field, if there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
