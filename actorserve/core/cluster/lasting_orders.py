"""Operators' orders that hold whichever coordinator serves: cordons by name, roles, values that were set, and budgets.

A coordinator forgets all when another one takes over, or when it restarts. So it tells these orders to its followers,
which tell them to the next coordinator. They are forgotten when all of the server's processes have ended.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from actorserve.core.cluster.standing_orders import StandingOrders
from actorserve.core.effects import Effect, Send
from actorserve.core.messages import Answer, Command, Cordon, InstanceRole, Orders, Outcome, Peer
from actorserve.core.operations.event_log import EventLog
from actorserve.core.operations.kept_orders import KeptOrders, Order
from actorserve.core.operations.verbs import problem_of

_CORDON: Final = "cordon"
_ROLE: Final = "role"
_CORDONS: Final = {cordon.value: cordon for cordon in Cordon}
_ROLES: Final = {role.value: role for role in InstanceRole}


class LastingOrders:
    """``carry_out`` does what a command says, as for an operator. ``followers`` are the gateways and workers."""

    def __init__(
        self,
        orders: StandingOrders,
        events: EventLog,
        carry_out: Callable[[Command, float, list[Effect]], Answer | None],
        followers: Callable[[], Iterable[Peer]],
    ) -> None:
        self.term = 0  # in which this coordinator serves
        self._orders = orders
        self._events = events
        self._carry_out = carry_out
        self._followers = followers
        self._kept = KeptOrders()
        self._refused: dict[tuple[str, str], Order] = {}  # they may depend on a host that is not up yet

    @property
    def settings(self) -> dict[str, str]:
        """What operators have set, by the settings' names, in whichever coordinator's time."""
        return self._kept.of_verb("set")

    def on_cordon(self, name: str, cordon: Cordon) -> list[Effect]:
        """An operator has ordered this of the worker called ``name``."""
        return self._add(_CORDON, name, cordon.value)

    def on_role(self, peer: Peer, role: InstanceRole) -> list[Effect]:
        """An operator has ordered this of the worker that is up as ``peer``. Its successor does not keep the role."""
        return self._add(_ROLE, peer.name, f"{role} {peer.incarnation}")

    def on_done(self, command: Command) -> list[Effect]:
        """An operator's command is done, if it is one that lasts."""
        match command.verb, command.arguments:
            case "set", (setting, value):
                return self._add("set", setting, value)
            case "scale", (target,):
                return self._add("scale", "", target)
            case "budget", (watts,):
                return self._add("budget", "", watts)
            case "budget", (watts, host):
                return self._add("budget", host, watts)
        return []

    def on_up(self, peer: Peer, now: float) -> list[Effect]:
        """A gateway or worker is up, which may follow us for the first time."""
        message = self._kept.message()
        told: list[Effect] = [] if message is None else [Send(peer, message)]
        return told + self.on_host_up(now)

    def on_host_up(self, now: float) -> list[Effect]:
        """A process is up, of a host that we may not have known. Orders about it are applied now."""
        return self._apply(list(self._refused.values()), now)

    def on_told(self, message: Orders, sender: Peer, now: float) -> list[Effect]:
        """A follower has kept these of an earlier coordinator.

        Orders of our own term or a later one are ignored, because we have given those of our term, and no coordinator
        has given later ones. Otherwise a false follower could tell an order after which none can be given.
        """
        later = self._kept.merge(message, self.term)
        news = self._kept.message(later) if later else None
        if news is None:
            return []
        for order in later:
            what = " ".join(word for word in (order.verb, order.subject, order.value) if word)
            self._events.add(now, "order", sender.name, f"it holds from an earlier coordinator: {what}")
        told: list[Effect] = [Send(peer, news) for peer in self._followers() if peer != sender]
        return told + self._apply([*self._refused.values(), *later], now)

    def _add(self, verb: str, subject: str, value: str) -> list[Effect]:
        self._refused.pop((verb, subject), None)
        message = self._kept.add(verb, subject, value, self.term)
        return [Send(peer, message) for peer in self._followers()]

    def _apply(self, orders: list[Order], now: float) -> list[Effect]:
        """Apply the orders in any sequence in which they can be applied, because a bound may depend on another one."""
        effects: list[Effect] = []
        left = {(order.verb, order.subject): order for order in orders}
        num_left = -1
        while len(left) != num_left:
            num_left = len(left)
            left = {key: order for key, order in left.items() if not self._is_applied(order, now, effects)}
        self._refused = left
        return effects

    def _is_applied(self, order: Order, now: float, effects: list[Effect]) -> bool:
        if order.verb == _CORDON:
            if order.value in _CORDONS:
                effects += self._orders.cordon(order.subject, _CORDONS[order.value])
            return True
        if order.verb == _ROLE:
            role, _, incarnation = order.value.partition(" ")
            if role in _ROLES and incarnation.isascii() and incarnation.isdecimal():
                effects += self._orders.keep_role(Peer(order.subject, int(incarnation)), _ROLES[role])
            return True
        command = Command("", order.verb, _ARGUMENTS[order.verb](order)) if order.verb in _ARGUMENTS else None
        if command is None or problem_of(command) is not None:
            return True  # of another version
        answer = self._carry_out(command, now, effects)
        return answer is None or answer.outcome is Outcome.DONE


_ARGUMENTS: Final[Mapping[str, Callable[[Order], tuple[str, ...]]]] = {
    "set": lambda order: (order.subject, order.value),
    "scale": lambda order: (order.value,),
    "budget": lambda order: (order.value, order.subject) if order.subject else (order.value,),
}
