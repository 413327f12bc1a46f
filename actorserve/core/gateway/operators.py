"""What operators ask of a gateway, through the coordinator: a gateway owns requests, so it tells where they are."""

from collections.abc import Callable

from actorserve.core.effects import Effect, Send
from actorserve.core.gateway.session import Session, SessionStage
from actorserve.core.messages import Answer, Column, Command, Outcome, Peer
from actorserve.core.operations.kept_orders import KeptOrders
from actorserve.core.operations.process_verbs import do_in_process, reads_keys
from actorserve.core.operations.request_log import RequestLog
from actorserve.core.operations.results import Results
from actorserve.core.operations.tables import integer_column, number_column, text_column
from actorserve.core.operations.verbs import VERBS, problem_of

MAX_ROWS = 4096
_STAGES = {
    SessionStage.PLACING: "waiting",
    SessionStage.STARTING: "starting",
    SessionStage.RUNNING: "running",
}


class GatewayOperators:
    """Answers the commands that the coordinator passes on. ``cancel`` ends an open request. ``orders`` are kept for the
    next coordinator.
    """

    def __init__(
        self,
        sessions: dict[str, Session],
        log: RequestLog,
        cancel: Callable[[str, float, list[Effect]], None],
    ) -> None:
        self._sessions = sessions
        self._log = log
        self._cancel = cancel
        self._results = Results()
        self.orders = KeptOrders()

    def on_command(self, command: Command, sender: Peer, now: float, effects: list[Effect]) -> None:
        """Answer a command of the coordinator."""
        answer = self._results.get(command.command_id)
        if answer is None:
            if reads_keys(command, sender, effects):
                return
            answer = self._answer(command, now, effects)
            if command.verb in VERBS and VERBS[command.verb].acts and not command.dry_run:
                self._results.add(answer)
        effects.append(Send(sender, answer))

    def _answer(self, command: Command, now: float, effects: list[Effect]) -> Answer:
        match command.verb, command.arguments:
            case _ if (problem := problem_of(command)) is not None:
                return _refused(command, problem)
            case "requests", arguments:
                return self._requests(command, arguments[0] if arguments else None, now)
            case "show", (request_id,) if called := self._log.called(request_id):
                return Answer(command.command_id, Outcome.DONE, "", self._log.table(called, now))
            case "show", (request_id,):
                return _refused(command, f"no process remembers a request {request_id}")
            case (("cancel" | "priority"), (request_id, *_)) if request_id not in self._sessions:
                return _refused(command, f"there is no open request {request_id}")
            case "cancel", (request_id,):
                if not command.dry_run:
                    self._cancel(request_id, now, effects)
                return _done(command, f"{request_id} ends" if command.dry_run else f"{request_id} has ended")
            case "priority", (request_id, number):
                if not command.dry_run:
                    self._sessions[request_id].set_priority(int(number))
                    self._log.note(request_id, now, "priority", number)
                return _done(command, f"{request_id} has priority {number}")
        answer = do_in_process(command, effects)
        return _refused(command, f"a gateway has no verb {command.verb}") if answer is None else answer

    def _requests(self, command: Command, worker: str | None, now: float) -> Answer:
        chosen = [
            session
            for session in self._sessions.values()
            if worker is None or (session.instance is not None and session.instance.name == worker)
        ]
        text = f"the first {MAX_ROWS} of {len(chosen)} requests" if len(chosen) > MAX_ROWS else ""
        return Answer(command.command_id, Outcome.DONE, text, request_table(chosen[:MAX_ROWS], now))


def request_table(sessions: list[Session], now: float) -> tuple[Column, ...]:
    """A row for each open request: where it is, its tokens, and its times in seconds."""
    return (
        text_column("request", [session.spec.request_id for session in sessions]),
        text_column("state", [_STAGES[session.stage] for session in sessions]),
        text_column("worker", ["" if session.instance is None else session.instance.name for session in sessions]),
        text_column("client", [session.spec.client for session in sessions]),
        integer_column("priority", [session.spec.priority for session in sessions]),
        integer_column("prompt_tokens", [len(session.spec.prompt_token_ids) for session in sessions]),
        integer_column("output_tokens", [len(session.output) for session in sessions]),
        integer_column("max_tokens", [session.spec.sampling.max_tokens for session in sessions]),
        integer_column("moves", [session.epoch - 1 for session in sessions]),
        number_column("age_s", [now - session.came_at_s for session in sessions]),
        number_column("silent_s", [now - session.served_at_s for session in sessions]),
    )


def _done(command: Command, text: str) -> Answer:
    return Answer(command.command_id, Outcome.DONE, f"would do: {text}" if command.dry_run else text)


def _refused(command: Command, why: str) -> Answer:
    return Answer(command.command_id, Outcome.REFUSED, why[:250])
