"""What a fetch can end with."""

from actorserve.errors import ActorserveError


class TransferError(ActorserveError):
    """Blocks could not be copied from another worker; nothing is written any more. Its text is one line."""
