"""Tables of a file, read strictly. An error is one line that names the key."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from actorserve.errors import SimulationError

_T = TypeVar("_T", bound="Table")
_KINDS = {
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
}
_BOUNDS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "at most"),
}


class Table(BaseModel):
    """A table of the file: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def parse_table(model: type[_T], values: Mapping[str, Any], place: str) -> _T:
    """Raises: SimulationError, in one line that names the key and says what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SimulationError(f"{place}: {_explain(error.errors()[0], model)}") from None


def _explain(problem: ErrorDetails, model: type[Table]) -> str:
    path = problem["loc"]
    key = ".".join(str(part) if str(part).isprintable() else repr(part) for part in path)
    match problem["type"]:
        case "extra_forbidden":
            return f"{key} is unknown: expected {', '.join(_known(model, path[:-1]))}"
        case "missing":
            return f"{key} is missing: expected {_expected(model, path)}"
        case "value_error":
            expectation = problem["msg"].removeprefix("Value error, ")
            return f"{key}.{expectation}" if key else expectation
        case "too_short":
            return f"{key} is empty: expected at least one"
        case "string_type" if _expected(model, path) != "a value":
            expected = _expected(model, path)
        case "string_pattern_mismatch":
            expected = _expected(model, path)
        case kind if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            expected = (
                f"{words} {problem['ctx'][name]:g}"
                if isinstance(problem["ctx"][name], float)
                else (f"{words} {problem['ctx'][name]}")
            )
        case "tuple_type":
            expected = "a list of tables" if _table(model, path) is not None else "a list"
        case kind:
            expected = _KINDS.get(kind) or problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{key} is {_shown(problem['input'])}: expected {expected}"


def _shown(value: Any) -> str:
    """The value as the file would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to convert very long integers to text
        return "a huge number"
    return repr(value[:60] if isinstance(value, str) else value)


def _table(model: type[Table], path: tuple[int | str, ...]) -> type[Table] | None:
    """The model of the table at this path, or of the tables in the list there."""
    for part in path:
        if isinstance(part, int):
            continue
        inner = model.model_fields.get(part)
        if inner is None:
            return None
        found = [kind for kind in _types(inner.annotation) if isinstance(kind, type) and issubclass(kind, Table)]
        if not found:
            return None
        model = found[0]
    return model


def _types(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation, *(inner for argument in arguments for inner in _types(argument))]


def _known(model: type[Table], path: tuple[int | str, ...]) -> list[str]:
    table = _table(model, path)
    return sorted(table.model_fields) if table is not None else ["none"]


def _expected(model: type[Table], path: tuple[int | str, ...]) -> str:
    table = _table(model, path[:-1])
    field = table.model_fields.get(str(path[-1])) if table is not None else None
    if field is None:
        return "a value"
    if field.description:
        return field.description
    is_list = getattr(field.annotation, "__origin__", None) is tuple
    if _table(model, path) is None:
        return "a list" if is_list else "a value"
    return "a list of tables" if is_list else "a table"
