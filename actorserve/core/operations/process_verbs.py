"""The verbs that every process does for itself, in the same way."""

from actorserve.core.effects import Effect, ReloadKeys, SetLogLevel
from actorserve.core.messages import Answer, Command, Outcome


def do_in_process(command: Command, effects: list[Effect]) -> Answer | None:
    """Do what the command asks of this process. None if it is not such a verb."""
    match command.verb:
        case "log-level":
            if not command.dry_run:
                effects.append(SetLogLevel(command.arguments[0]))
        case "reload-keys":
            if not command.dry_run:
                effects.append(ReloadKeys())
        case _:
            return None
    return Answer(command.command_id, Outcome.DONE)
