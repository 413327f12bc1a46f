"""Renames fields in errors. A client reads the names of its own protocol, not those of the chat that its request
becomes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from actorserve.errors import InvalidRequestError


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequestError about a field of a chat names the field of ``names`` instead, if there is one."""
    try:
        yield
    except InvalidRequestError as error:
        field, dot, rest = (error.param or "").partition(".")
        if field not in names:
            raise
        param = f"{names[field]}{dot}{rest}"
        message = str(error)
        if error.param and message.startswith(error.param):
            message = param + message[len(error.param) :]
        raise InvalidRequestError(message, param, error.code) from None
