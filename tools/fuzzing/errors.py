"""The errors of this package."""

from actorserve.errors import ActorserveError


class FuzzError(ActorserveError):
    """The input cannot be sent at all, because no server starts or a socket is missing."""


class BrokenServerError(ActorserveError):
    """The server did not stand the input; the text is one line that says how."""
