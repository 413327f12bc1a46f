"""Bounds for values that a client may shape as it likes: schemas, template arguments, documents."""

from typing import Any

from actorserve.http.requests.strict import wrong

_MAX_DEPTH = 64
_MAX_VALUES = 20_000


def bounded_object(value: object) -> dict[str, Any]:
    """``value``, if it is a JSON object within these bounds. Raises: PydanticCustomError."""
    if not isinstance(value, dict):
        raise wrong("must be an object")
    check_bounds(value)
    return value


def check_bounds(value: object) -> None:
    """Raises: PydanticCustomError if parsed JSON is nested deeper than 64, or consists of more than 20,000 values."""
    level: list[object] = [value]
    num_values = 0
    for _ in range(_MAX_DEPTH):
        num_values += len(level)
        if num_values > _MAX_VALUES:
            raise wrong(f"has more than {_MAX_VALUES} values")
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise wrong(f"is nested deeper than {_MAX_DEPTH}")
