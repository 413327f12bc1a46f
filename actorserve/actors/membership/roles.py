"""Which roles of processes are linked to each other."""

from typing import Final

from actorserve.core.messages import Role

COORDINATOR_NAME: Final = "coordinator"
MAX_PEERS: Final = 4096


def are_linked(one: Role, other: Role) -> bool:
    """Whether processes of these roles meet without being asked to, because they need each other."""
    return one is not other and (Role.COORDINATOR in (one, other) or {one, other} == {Role.GATEWAY, Role.WORKER})


def may_link(one: Role, other: Role) -> bool:
    """Whether processes of these roles may meet at all."""
    return are_linked(one, other) or one is other is Role.WORKER
