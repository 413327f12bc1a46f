"""The error that ends a fetch."""

from actorserve.errors import ActorserveError


class TransferError(ActorserveError):
    """Blocks could not be copied from another worker; after it nothing more is written. The text is one line."""
