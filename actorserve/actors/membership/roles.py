"""Which processes talk to each other."""

from typing import Final

from actorserve.core.messages import Role

COORDINATOR_NAME: Final = "coordinator"
MAX_PEERS: Final = 4096


def are_linked(one: Role, other: Role) -> bool:
    """Whether processes of these roles need each other. Such processes meet without being asked to."""
    return one is not other and (Role.COORDINATOR in (one, other) or {one, other} == {Role.GATEWAY, Role.WORKER})


def may_link(one: Role, other: Role) -> bool:
    """Whether processes of these roles ever talk to each other."""
    return are_linked(one, other) or one is other is Role.WORKER
