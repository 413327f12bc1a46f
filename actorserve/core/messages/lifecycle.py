"""Messages: time, and how processes start and end."""

from actorserve.core.messages.value import value
from actorserve.core.messages.values import Cordon, InstanceRole


@value
class StartFailed:
    """Local: a worker that was ordered will not start. Failures may go unreported, so a timeout applies as well."""


@value
class Tick:
    """Local: the deadline that ``next_deadline`` named has come."""


@value
class Drain:
    """c -> w, or local: take no new requests, finish those that run or move them elsewhere, and end.

    ``comes_back``: the process that watches over the worker is to start it again at once.
    """

    comes_back: bool = False


@value
class SetCordon:
    """c -> w: an operator ordered this. The worker reports it from now on, so that any coordinator knows it.

    Repeated until a load report shows it.
    """

    cordon: Cordon


@value
class SetRole:
    """c -> w: an operator ordered this role. Requests that the worker has stay, until they end or move away.

    Repeated until a load report shows it.
    """

    role: InstanceRole
