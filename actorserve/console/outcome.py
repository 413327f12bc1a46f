"""How a console ends, and the JSON that it writes."""

import json
from enum import IntEnum
from typing import Any, Final

from actorserve.core.messages import Answer, Command
from actorserve.core.operations.tables import rows

SCHEMA: Final = 1
"""The version of the JSON. It grows when a field is renamed or removed; new fields may come at any time."""


class Exit(IntEnum):
    """The exit status of ``actorserve console``."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    TIMEOUT = 3


def as_json(command: Command, answer: Answer) -> str:
    """The answer as one JSON object on one line."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "verb": command.verb,
            "id": command.command_id,
            "dry_run": command.dry_run,
            "outcome": answer.outcome.value,
            "text": answer.text,
            "rows": as_objects(answer),
        }
    )


def as_objects(answer: Answer) -> list[dict[str, Any]]:
    """The table's rows. An unknown number is None."""
    names = [column.name for column in answer.columns]
    return [dict(zip(names, row, strict=True)) for row in rows(answer.columns)]
