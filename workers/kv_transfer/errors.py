"""The errors that end a fetch."""

from actorserve.errors import ActorserveError


class TransferError(ActorserveError):
    """Blocks could not be copied from another worker; after it nothing more is written. The text is one line."""


class DirectCopyError(TransferError):
    """This GPU cannot read the source's GPU directly. The source can still send its blocks."""
