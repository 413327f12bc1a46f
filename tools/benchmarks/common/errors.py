"""The error that ends a measurement."""

from actorserve.errors import ActorserveError


class BenchError(ActorserveError):
    """Ends a measurement. The text is one line that a person can act on."""
