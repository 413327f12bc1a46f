"""Messages: what operators ask of the server, and the answers.

``o`` is an operator's console. The coordinator answers, and passes on to gateways and workers what they must do or
tell.
"""

from enum import StrEnum

from actorserve.core.messages.value import value


class Outcome(StrEnum):
    """Whether what was asked is done."""

    DONE = "done"
    REFUSED = "refused"
    STANDBY = "standby"  # the coordinator that was asked does not serve now


@value
class Command:
    """o -> c, c -> g, c -> w: do this, or tell this. ``core.operations.verbs`` lists the verbs and their arguments.

    Repeatable: an act that was done under ``command_id`` is not done again, and the answer is the same. ``dry_run``:
    check everything, and say what would be done.
    """

    command_id: str
    verb: str
    arguments: tuple[str, ...] = ()
    dry_run: bool = False


@value
class Column:
    """One column of a table: its values are in one of the tuples, and the others are empty. NaN: unknown."""

    name: str
    texts: tuple[str, ...] = ()
    integers: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()


@value
class Answer:
    """c -> o, g -> c, w -> c: the outcome, one line about it for a person, and a table of equally long columns."""

    command_id: str
    outcome: Outcome
    text: str = ""
    columns: tuple[Column, ...] = ()


@value
class Orders:
    """c -> g, c -> w, g -> c, w -> c: orders of operators that hold whichever coordinator serves, as parallel columns.

    Gateways and workers keep them, and tell them to each coordinator that they begin to follow. An order has a verb,
    what it concerns (a worker, a setting, a host, or empty) and a value. Of two with the same verb and subject, the one
    of the later term holds, and within a term the one with the higher number.
    """

    verbs: tuple[str, ...]
    subjects: tuple[str, ...]
    values: tuple[str, ...]
    terms: tuple[int, ...]
    numbers: tuple[int, ...]


@value
class ActsDone:
    """Local: answers to acts that an earlier coordinator wrote to the audit file, as parallel columns."""

    command_ids: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    texts: tuple[str, ...]
