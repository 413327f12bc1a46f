"""The operators' commands at the coordinator: it answers what it knows, and asks other processes for the rest.

Reads answer from the coordinator's own state, or from the gateways, which own the requests. Acts are audited, once for
each id of a command, and a repeated command gets the first answer again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from actorserve.core.cluster.lasting_orders import LastingOrders
from actorserve.core.cluster.questions import Questions
from actorserve.core.cluster.standing_orders import StandingOrders
from actorserve.core.cluster.tables import host_of, host_table, state_of, top_table, worker_table
from actorserve.core.effects import Audit, Effect, Send
from actorserve.core.messages import (
    LOCAL,
    ActsDone,
    Answer,
    Column,
    Command,
    Cordon,
    InstanceRole,
    MigrateTo,
    Outcome,
    Peer,
)
from actorserve.core.operations.event_log import EventLog
from actorserve.core.operations.process_verbs import READ, do_in_process, reads_keys
from actorserve.core.operations.results import Results
from actorserve.core.operations.tables import MAX_CELL_CHARS, key_values, sorted_by
from actorserve.core.operations.verbs import CALLER_PREFIX, VERBS, nearest, problem_of
from actorserve.core.placement.fleet import Fleet
from actorserve.core.placement.instance_view import InstanceView, NewInstance


@dataclass(frozen=True, slots=True)
class Ask:
    """Other processes must answer the command first, in this form. ``needs_all``: every one of them. ``LOCAL`` among
    them is this process, which an effect asks.
    """

    peers: tuple[Peer, ...]
    command: Command
    needs_all: bool = False


Handler = Callable[[Command, float, list[Effect]], Answer | Ask]
"""Answers a command at a time in seconds, and appends what it leads to."""

COORDINATOR: Final = "coordinator"
CORDONS: Final = {"cordon": Cordon.CORDONED, "uncordon": Cordon.OPEN, "drain": Cordon.EMPTYING}
_WORDS: Final = {
    Cordon.CORDONED: "gets no more requests",
    Cordon.OPEN: "gets requests again",
    Cordon.EMPTYING: "gets no more requests, and its requests move away",
}

_PHASES: Final = {
    InstanceRole.MIXED: "prompts and the tokens after them",
    InstanceRole.PROMPT: "prompts only",
    InstanceRole.TOKEN: "the tokens after prompts only",
}


class Operators:
    """Answers the commands of operators' consoles. ``status`` gives the lines of the verb of that name."""

    def __init__(
        self,
        fleet: Fleet,
        status: Callable[[], Iterable[tuple[str, object]]],
        more: Mapping[str, Handler],
        results: Results,
        *,
        moves: bool,
    ) -> None:
        """``more``: the handlers of further verbs. ``results``: the answers to earlier acts. ``moves``: whether
        requests move between workers at all.
        """
        self.name = COORDINATOR
        self.events = EventLog()
        self.orders = StandingOrders(fleet)
        self.gateways: dict[Peer, None] = {}
        self.lasting = LastingOrders(
            self.orders, self.events, self._carry_out, lambda: (*self.gateways, *fleet.instances)
        )
        self._fleet = fleet
        self._status = status
        self._moves = moves
        self._results = results
        self._questions = Questions()
        self._handlers: dict[str, Handler] = {
            "status": self._on_status,
            "workers": self._on_workers,
            "hosts": self._on_hosts,
            "top": self._on_top,
            "events": self._on_events,
            "restart": self._on_restart,
            "role": self._on_role,
            "migrate": self._on_migrate,
            "requests": self._on_requests,
            "cancel": self._ask_gateways,
            "show": self._ask_all,
            "priority": self._ask_all,
            "log-level": self._on_process_verb,
            "reload-keys": self._on_reload_keys,
            **dict.fromkeys(CORDONS, self._on_cordon),
            **more,
        }

    def add(self, more: Mapping[str, Handler]) -> None:
        """Answer further verbs."""
        self._handlers |= more

    # --- events ------------------------------------------------------------------------------------------------------

    def on_command(self, command: Command, caller: Peer, now: float) -> list[Effect]:
        """Answer a command, now or once other processes have answered."""
        known = self._results.get(command.command_id)
        if known is not None:
            return [Send(caller, known)]
        if command.command_id in self._questions:
            self._questions.again(command.command_id, caller)
            return []
        problem = problem_of(command)
        handler = self._handlers.get(command.verb)
        if problem is None and handler is None:
            problem = f"the coordinator has no verb {command.verb}"
        if problem is not None or handler is None:
            return self._conclude(command, caller, refused(command, problem or ""), now)
        effects: list[Effect] = []
        handled = handler(command, now, effects)
        if isinstance(handled, Answer):
            if handled.outcome is Outcome.DONE and not command.dry_run:
                effects += self.lasting.on_done(command)
            return effects + self._conclude(command, caller, handled, now)
        effects += [Send(peer, handled.command) for peer in handled.peers if peer != LOCAL]
        self._questions.ask(command, caller, handled.peers, now, needs_all=handled.needs_all)
        return effects + self._settle(now)

    def on_answer(self, answer: Answer, sender: Peer, now: float) -> list[Effect] | None:
        """A process that was asked has answered. None if it was not asked."""
        return self._settle(now) if self._questions.on_answer(answer, sender) else None

    def on_acts_done(self, message: ActsDone) -> None:
        """Know the answers that an earlier coordinator gave."""
        for command_id, outcome, text in zip(message.command_ids, message.outcomes, message.texts, strict=True):
            self._results.add(Answer(command_id, outcome, text))

    def on_down(self, peer: Peer, now: float) -> list[Effect]:
        """A process is gone."""
        self.gateways.pop(peer, None)
        self.orders.on_down(peer)
        self._questions.on_down(peer)
        return self._settle(now)

    def on_tick(self, now: float) -> list[Effect]:
        return self._settle(now)

    def next_deadline(self) -> float | None:
        return self._questions.next_deadline()

    def note_moves(self, orders: Iterable[Send], now: float) -> None:
        """Remember which workers were told to move requests to which."""
        for order in orders:
            if isinstance(order.message, MigrateTo) and order.message.num_bytes:
                text = f"to {order.message.destination.name}, up to {order.message.num_bytes} bytes of KV"
                self.events.add(now, "move", order.to.name, text)

    def _carry_out(self, command: Command, now: float, effects: list[Effect]) -> Answer | None:
        """What a lasting order says. None if this coordinator has no such verb, or must ask others."""
        handler = self._handlers.get(command.verb)
        answer = None if handler is None else handler(command, now, effects)
        return answer if isinstance(answer, Answer) else None

    # --- answers -----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for question in self._questions.take_settled(now):
            answer = question.answer()
            if question.command.verb == "show":
                answer = replace(answer, columns=sorted_by(answer.columns, "ago_s", reverse=True))
            if question.command.verb == "reload-keys":
                answer = _keys_read(answer)
            is_known = not question.waits_for  # what a silent process did is not known, so a repeat asks it again
            effects += self._conclude(question.command, question.caller, answer, now, is_known=is_known)
        return effects

    def _conclude(
        self, command: Command, caller: Peer, answer: Answer, now: float, *, is_known: bool = True
    ) -> list[Effect]:
        """Answer; and if it was an act, have it audited and remember the answer."""
        verb = VERBS.get(command.verb)
        effects: list[Effect] = [Send(caller, answer)]
        if verb is not None and verb.acts and not command.dry_run:
            if is_known:
                self._results.add(answer)
            asked = " ".join((command.verb, *command.arguments))
            name = caller.name.removeprefix(CALLER_PREFIX)
            self.events.add(now, "operator", name, f"{asked} - {answer.text}" if answer.text else asked)
            effects.append(Audit(name, command, answer.outcome, answer.text))
        return effects

    # --- verbs -------------------------------------------------------------------------------------------------------

    def _ask_gateways(self, command: Command, now: float, effects: list[Effect]) -> Ask:
        return Ask(tuple(self.gateways), command)

    def _ask_all(self, command: Command, now: float, effects: list[Effect]) -> Ask:
        return Ask((*self.gateways, *self._fleet.instances), command)

    def _on_process_verb(self, command: Command, now: float, effects: list[Effect]) -> Answer | Ask:
        """Every process does it, or the one that a last argument names."""
        others = [*self.gateways, *self._fleet.instances]
        num_own = 1 if command.verb == "log-level" else 0
        if len(command.arguments) > num_own:
            name = command.arguments[num_own]
            others = [peer for peer in others if peer.name == name]
            if not others and name != self.name:
                return refused(command, f"there is no process {name}")
            if others:
                return Ask(tuple(others), command, needs_all=True)
        answer = do_in_process(command, effects)
        return answer if answer is not None and not others else Ask(tuple(others), command, needs_all=True)

    def _on_reload_keys(self, command: Command, now: float, effects: list[Effect]) -> Answer | Ask:
        others = (*self.gateways, *self._fleet.instances)
        if command.dry_run:
            return done(command, f"{len(others) + 1} process(es) read the files of keys again")
        reads_keys(command, LOCAL, effects)
        return Ask((LOCAL, *others), command, needs_all=True)

    def _on_requests(self, command: Command, now: float, effects: list[Effect]) -> Answer | Ask:
        if command.arguments and not self._workers(command.arguments[0]):
            return refused(command, self._unknown(command.arguments[0]))
        if not self.gateways:
            return refused(command, "no gateway is up")
        return Ask(tuple(self.gateways), command, needs_all=True)

    def _on_status(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        return done(command, columns=key_values(self._status()))

    def _on_hosts(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        return done(command, columns=host_table(self._fleet.instances.values(), self.gateways))

    def _on_top(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        return done(command, columns=top_table(self._fleet.instances.values(), self._fleet.reported_s, now))

    def _on_workers(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        instances = list(self._fleet.instances.values())
        if command.arguments:
            names = self._targets(command.arguments[0])
            if not names:
                return refused(command, self._unknown(command.arguments[0]))
            instances = [instance for instance in instances if instance.peer.name in names]
        return done(command, columns=worker_table(instances))

    def _on_events(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        since = int(command.arguments[0]) if command.arguments else 0
        num_missed = self.events.num_missed(since)
        text = f"{num_missed} earlier event(s) are forgotten" if num_missed else ""
        return done(command, text, self.events.table(since, now))

    def _on_cordon(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        (target,) = command.arguments
        cordon = CORDONS[command.verb]
        names = self._targets(target)
        if not names:
            return refused(command, self._unknown(target))
        if not command.dry_run:
            for name in names:
                effects += self.orders.cordon(name, cordon)
                effects += self.lasting.on_cordon(name, cordon)
        stays = cordon is Cordon.EMPTYING and not self._moves
        why = "; they end there, because migration.enabled is false" if stays else ""
        return done(command, f"{', '.join(names)}: {_WORDS[cordon]}{why}")

    def _on_restart(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        (name,) = command.arguments
        view = next((view for view in self._workers(name) if isinstance(view, InstanceView)), None)
        if view is None:
            return refused(command, self._unknown(name))
        if not command.dry_run:
            effects += self.orders.restart(view)
        return done(command, f"{name} restarts once its requests have moved away or ended")

    def _on_role(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        name, role = command.arguments[0], InstanceRole(command.arguments[1])
        view = next((view for view in self._workers(name) if isinstance(view, InstanceView)), None)
        if view is None:
            return refused(command, self._unknown(name))
        if not command.dry_run:
            effects += self.orders.role(view, role)
            effects += self.lasting.on_role(view.peer, role)
        return done(command, f"{name} computes {_PHASES[role]} until it restarts")

    def _on_migrate(self, command: Command, now: float, effects: list[Effect]) -> Answer | Ask:
        """The worker that runs the request decides. Only workers of the destination's kind are asked, because a move
        to another kind would change the answer.
        """
        request_id, name = command.arguments
        view = next((view for view in self._workers(name) if isinstance(view, InstanceView)), None)
        if view is None:
            return refused(command, self._unknown(name))
        if not view.is_healthy:
            return refused(command, f"{name} takes no requests now: it is {state_of(view)}")
        alike = [
            other.peer for other in self._fleet.instances.values() if other.kind == view.kind and other is not view
        ]
        if not alike:
            return refused(command, f"no other worker is of the kind of {name}")
        arguments = (request_id, name, str(view.peer.incarnation))
        return Ask(tuple(alike), replace(command, arguments=arguments))

    # --- names -------------------------------------------------------------------------------------------------------

    def _workers(self, name: str) -> list[NewInstance | InstanceView]:
        """The worker called ``name``, if it is up."""
        return [instance for instance in self._fleet.instances.values() if instance.peer.name == name]

    def _targets(self, target: str) -> list[str]:
        """The names of the workers that a worker's or a host's name stands for, also of cordoned ones that are down."""
        names = dict.fromkeys((*(peer.name for peer in self._fleet.instances), *self.orders.cordons))
        return [target] if target in names else [name for name in names if host_of(name) == target]

    def _unknown(self, target: str) -> str:
        names = [peer.name for peer in self._fleet.instances]
        hosts = list(dict.fromkeys(map(host_of, names)))
        return f"there is no worker or host {target}{nearest(target, [*names, *hosts])}"


def done(command: Command, text: str = "", columns: tuple[Column, ...] = ()) -> Answer:
    """What was asked is done, or would be done."""
    return Answer(command.command_id, Outcome.DONE, _short(f"would do: {text}" if command.dry_run else text), columns)


def refused(command: Command, why: str) -> Answer:
    return Answer(command.command_id, Outcome.REFUSED, _short(why))


def _keys_read(answer: Answer) -> Answer:
    """One line of what all processes together have read, instead of a line for every process."""
    names = dict.fromkeys(name for column in answer.columns if column.name == READ for name in column.texts)
    said = f"read again: {', '.join(names)}" if names else "no file of keys was read"
    return replace(answer, text=_short(f"{answer.text}; {said}" if answer.text else said), columns=())


def _short(text: str) -> str:
    return text[:MAX_CELL_CHARS]
