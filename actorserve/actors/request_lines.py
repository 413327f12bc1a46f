"""Debug lines about requests: one for each message about a request that a process gets or sends, with the request's id.

The id begins with the one that the client sent as ``x-request-id``, so a search for that finds a request's whole way
through all processes. The lines tell no text and no tokens of clients. There is none for tokens, which would drown all
else.
"""

import logging
from typing import Any, Final

from actorserve import logs
from actorserve.core.messages import (
    Close,
    Finished,
    HandOver,
    Keep,
    Message,
    Open,
    Peer,
    Place,
    Placed,
    Refused,
    Release,
    RequestSpec,
    Resend,
    Start,
    Started,
    Unplace,
)

_log: Final = logging.getLogger("actorserve.requests")


def log_message(what: str, peer: Peer | None, message: Message) -> None:
    """Log ``message`` if it is about one request. ``what``: ``from`` or ``to``. ``peer``: None if it is local."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    values = _values(message)
    if values is not None:
        who = "" if peer is None else f" {what} {peer.name}"
        _log.debug("%s%s", type(message).__name__, who, extra=logs.fields(**values))


def _values(message: Message) -> dict[str, Any] | None:
    """What the line says of the request; None for a message that is not about one."""
    values: dict[str, Any]
    match message:
        case Open(request=spec):
            return _of_spec(spec)
        case Start(request=spec):
            has_kv = message.transfer is not None
            return _of_spec(spec) | {"epoch": message.epoch, "with_kv": has_kv}
        case Close():
            return {"request_id": message.request_id}
        case Place():
            values = {"num_tokens": message.num_tokens, "priority": message.priority, "waited_s": message.waited_s}
        case Placed():
            values = {"worker": message.instance.name, "waited_s": message.waited_s}
        case Refused():
            values = {"reason": message.reason.value}
        case Finished():
            values = {"reason": message.reason.value, "output_tokens": message.num_output_tokens}
            if message.energy is not None:
                values |= {"prompt_joules": message.energy.prompt_j, "token_joules": message.energy.token_j}
        case HandOver():
            values = {"worker": message.to.name, "output_tokens": message.num_output_tokens}
        case Resend():
            values = {"from_position": message.from_position}
        case Started() | Release() | Keep() | Unplace():
            values = {}
        case _:
            return None
    return {"request_id": message.request_id, "epoch": message.epoch} | values


def _of_spec(spec: RequestSpec) -> dict[str, Any]:
    return {
        "request_id": spec.request_id,
        "key": spec.client or None,
        "prompt_tokens": len(spec.prompt_token_ids),
        "output_tokens": len(spec.output_token_ids),
        "max_tokens": spec.sampling.max_tokens,
        "priority": spec.priority,
    }
