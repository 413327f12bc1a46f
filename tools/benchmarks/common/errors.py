"""What a person did or met that ends a measurement before it starts."""

from actorserve.errors import ActorserveError


class BenchError(ActorserveError):
    """Its text is one line that a person can act on."""
