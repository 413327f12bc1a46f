"""Which processes may send which messages. A message that is missing here may come from no process of another host.

With keys (``wire.trust``), a receiver drops a message from a process that may not send it.
"""

from typing import Final

from actorserve.core import messages as m
from actorserve.core.messages import Message, Role

_ANY: Final = frozenset(Role)
_COORDINATOR: Final = frozenset({Role.COORDINATOR})
_GATEWAY: Final = frozenset({Role.GATEWAY})
_WORKER: Final = frozenset({Role.WORKER})
_POWER: Final = frozenset({Role.POWER})

SENDERS: Final[dict[type[Message], frozenset[Role]]] = {
    m.Hello: _ANY,
    m.Members: _COORDINATOR,
    m.Heartbeat: _ANY,
    m.Goodbye: _ANY,
    m.Fenced: _ANY,
    m.Serving: _COORDINATOR,
    m.Following: _GATEWAY | _WORKER | _POWER,
    m.Place: _GATEWAY,
    m.Placed: _COORDINATOR,
    m.Refused: _COORDINATOR | _WORKER,
    m.Unplace: _GATEWAY,
    m.Start: _GATEWAY,
    m.Started: _WORKER,
    m.Tokens: _WORKER,
    m.Finished: _WORKER,
    m.Release: _GATEWAY,
    m.Resend: _GATEWAY,
    m.LoadReport: _WORKER,
    m.LoadDigest: _COORDINATOR,
    m.WantReports: _GATEWAY,
    m.MigrateTo: _COORDINATOR,
    m.Offer: _WORKER,
    m.Stage: _WORKER,
    m.Copied: _WORKER,
    m.Declined: _WORKER,
    m.Withdrawn: _WORKER,
    m.HandOver: _WORKER,
    m.Keep: _GATEWAY,
    m.Drain: _COORDINATOR,
    m.SetCordon: _COORDINATOR,
    m.SetRole: _COORDINATOR,
    m.Command: _COORDINATOR,
    m.Answer: _GATEWAY | _WORKER,
    m.Orders: _COORDINATOR | _GATEWAY | _WORKER,
    m.CheckpointTo: _COORDINATOR,
    m.Checkpoint: _WORKER,
    m.CheckpointConfirmed: _WORKER,
    m.Checkpointed: _WORKER,
    m.SetPowerCaps: _COORDINATOR,
    m.PowerReport: _POWER,
}


MESSAGES_OF: Final = {role: frozenset(message for message, roles in SENDERS.items() if role in roles) for role in Role}
"""The messages that processes of a role may send."""

_ROLES: Final = {role.value: role for role in Role}


def role_of(name: str) -> Role | None:
    """The role in a process's name, such as ``alpha/worker-0`` or ``coordinator``; None for any other name."""
    return _ROLES.get(name.rpartition("/")[2].partition("-")[0])
