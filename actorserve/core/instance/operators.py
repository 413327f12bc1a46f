"""What operators ask of an instance, through the coordinator."""

from actorserve.core.instance.parts import InstanceParts
from actorserve.core.messages import Answer, Command, Orders, Outcome, Peer
from actorserve.core.migration.source import MigrationSource
from actorserve.core.operations.kept_orders import KeptOrders
from actorserve.core.operations.process_verbs import do_in_process, reads_keys
from actorserve.core.operations.request_log import RequestLog
from actorserve.core.operations.results import Results
from actorserve.core.operations.verbs import VERBS, problem_of


class InstanceOperators:
    """Answers the commands that coordinators pass on. ``coordinators`` are those that are up."""

    def __init__(self, parts: InstanceParts, source: MigrationSource, log: RequestLog) -> None:
        self.coordinators: set[Peer] = set()
        self._parts = parts
        self._source = source
        self._log = log
        self._results = Results()
        self._orders = KeptOrders()  # for the next coordinator

    def on_coordinator_up(self, coordinator: Peer) -> None:
        """We follow this coordinator from now on."""
        self.coordinators.add(coordinator)
        orders = self._orders.message()
        if orders is not None:
            self._parts.effects.send(coordinator, orders)

    def on_orders(self, message: Orders, sender: Peer, now: float) -> bool:
        """False for orders of a process that is no coordinator."""
        if sender not in self.coordinators:
            return False
        self._orders.merge(message)
        return True

    def on_command(self, command: Command, sender: Peer, now: float) -> bool:
        """False for a command of a process that is no coordinator."""
        if sender not in self.coordinators:
            return False
        answer = self._results.get(command.command_id)
        if answer is None:
            if reads_keys(command, sender, self._parts.effects):
                return True
            answer = self._answer(command, now)
            if command.verb in VERBS and VERBS[command.verb].acts and not command.dry_run:
                self._results.add(answer)
        self._parts.effects.send(sender, answer)
        return True

    def _answer(self, command: Command, now: float) -> Answer:
        match command.verb, command.arguments:
            case "migrate", (request_id, name, incarnation) if incarnation.isdecimal():
                return self._migrate(command, request_id, Peer(name, int(incarnation)), now)
            case _ if (problem := problem_of(command)) is not None:
                return _refused(command, problem)
            case "show", (request_id,):
                return self._show(command, request_id, now)
            case "priority", (request_id, number):
                return self._set_priority(command, request_id, int(number), now)
        answer = do_in_process(command, self._parts.effects)
        return _refused(command, f"a worker has no verb {command.verb}") if answer is None else answer

    def _migrate(self, command: Command, request_id: str, to: Peer, now: float) -> Answer:
        if request_id not in self._parts.requests:
            return _refused(command, f"no worker that may move it there has a request {request_id}")
        problem = self._source.order(request_id, to, now, dry_run=command.dry_run)
        if problem is not None:
            return _refused(command, f"{request_id}: {problem}")
        would = "would move" if command.dry_run else "moves"
        return Answer(command.command_id, Outcome.DONE, f"{request_id} {would} to {to.name}")

    def _show(self, command: Command, request_id: str, now: float) -> Answer:
        called = self._log.called(request_id)
        if not called:
            return _refused(command, f"no process remembers a request {request_id}")
        return Answer(command.command_id, Outcome.DONE, "", self._log.table(called, now))

    def _set_priority(self, command: Command, request_id: str, priority: int, now: float) -> Answer:
        parts = self._parts
        request = parts.requests.get(request_id)
        if request is None:
            return _refused(command, f"there is no open request {request_id}")
        if not command.dry_run:
            parts.set_priority(request, priority, now)
        would = "would get" if command.dry_run else "has"
        return Answer(command.command_id, Outcome.DONE, f"{request_id} {would} priority {priority}")


def _refused(command: Command, why: str) -> Answer:
    return Answer(command.command_id, Outcome.REFUSED, why[:250])
