"""What ends ``tools/clients`` before a client was checked."""

from actorserve.errors import ActorserveError


class CompatibilityError(ActorserveError):
    """The text is one line that says what to do."""


class MissingProgramError(CompatibilityError):
    """This machine lacks a program, so a client can not be installed and its checks are skipped."""
