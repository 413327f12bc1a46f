"""The orders of operators that outlive a coordinator, as every process keeps them."""

from typing import Final, NamedTuple

from actorserve.core.messages import Orders

MAX_ORDERS: Final = 4096
_MAX_NUMBER: Final = 2**62  # no correct process reaches it, and the wire can carry larger numbers


class Order(NamedTuple):
    """An order, in the sequence in which orders replace each other. ``subject``: what it concerns."""

    term: int
    number: int
    verb: str
    subject: str
    value: str


class KeptOrders:
    """The last order of each verb for each subject. New subjects beyond ``MAX_ORDERS`` are not kept."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, str], Order] = {}

    def add(self, verb: str, subject: str, value: str, term: int) -> Orders:
        """Keep an order that is given now, in ``term``, which is the last one. Returns what other processes have to
        keep.
        """
        number = max([order.number for order in self._orders.values() if order.term == term], default=0) + 1
        order = Order(term, number, verb, subject, value)
        self._put(order)
        return _message([order])

    def merge(self, message: Orders, before_term: int = _MAX_NUMBER) -> list[Order]:
        """Keep the orders of ``message`` that are later than ours, and were given before the term ``before_term``.
        Returns these, the earliest first.
        """
        columns = (message.terms, message.numbers, message.verbs, message.subjects, message.values)
        told = sorted(Order(*row) for row in zip(*columns, strict=True))
        return [order for order in told if order.term < before_term and order.number < _MAX_NUMBER and self._put(order)]

    def of_verb(self, verb: str) -> dict[str, str]:
        """The values of the orders with this verb, by subject."""
        return {order.subject: order.value for order in self._orders.values() if order.verb == verb}

    def message(self, orders: list[Order] | None = None) -> Orders | None:
        """These orders, or all, for another process; None without any."""
        chosen = list(self._orders.values()) if orders is None else orders
        return _message(chosen) if chosen else None

    def _put(self, order: Order) -> bool:
        key = (order.verb, order.subject)
        known = self._orders.get(key)
        if (known is None and len(self._orders) >= MAX_ORDERS) or (known is not None and known >= order):
            return False
        self._orders[key] = order
        return True


def _message(orders: list[Order]) -> Orders:
    terms, numbers, verbs, subjects, values = zip(*orders, strict=True)
    return Orders(verbs, subjects, values, terms, numbers)
