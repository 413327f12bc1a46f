"""The verbs that every process does for itself, in the same way."""

from collections.abc import Sequence

from actorserve.core.effects import Effect, ReloadKeys, SetLogLevel
from actorserve.core.messages import Answer, Command, Outcome, Peer
from actorserve.core.operations.tables import text_column
from actorserve.core.operations.verbs import problem_of

READ = "read"
"""The column with the names of what was read again."""


def do_in_process(command: Command, effects: list[Effect]) -> Answer | None:
    """Do what the command asks of this process. None if it is not such a verb."""
    match command.verb:
        case "log-level":
            if not command.dry_run:
                effects.append(SetLogLevel(command.arguments[0]))
        case "reload-keys" if command.dry_run:
            pass
        case _:
            return None
    return Answer(command.command_id, Outcome.DONE)


def reads_keys(command: Command, sender: Peer, effects: list[Effect]) -> bool:
    """Have the files of keys read again, if the command says so. The actor answers it, because only the actor knows
    what could be read. A repeat reads them once more, which does no harm.
    """
    if command.verb != "reload-keys" or command.dry_run or problem_of(command) is not None:
        return False
    effects.append(ReloadKeys(sender, command.command_id))
    return True


def keys_answer(command_id: str, read: Sequence[str], failed: Sequence[str]) -> Answer:
    """The answer of a process that has read its files of keys again, except those that ``failed``."""
    text = f"{', '.join(failed)} stayed as before, because of what the log says" if failed else ""
    outcome = Outcome.REFUSED if failed else Outcome.DONE
    return Answer(command_id, outcome, text, (text_column(READ, read),))
