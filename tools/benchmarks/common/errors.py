"""The error that ends a measurement."""

from actorserve.errors import ActorserveError


class BenchError(ActorserveError):
    """Its text is one line that a person can act on."""
