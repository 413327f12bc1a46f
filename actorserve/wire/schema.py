"""Checkers of arity, types, bounds and equal columns, compiled once per message class from its annotations.

A checker takes a value from msgpack and returns the value that the annotation asks for, or raises ``SchemaError``.
The depth of recursion depends on the annotations alone, not on a frame's content.
"""

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any, get_args, get_origin, get_type_hints

Checker = Callable[[Any], Any]

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
MAX_STRING_BYTES = 1024


class SchemaError(ValueError):
    """A decoded value does not match its annotation. The text does not repeat the value, which may be long."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for a class that its annotations cannot express.

    ``columns`` are tuples of equal length; ``optional_columns`` have the same length, or are empty. ``run_columns``
    have as many items as the sum of the column ``run_lengths``, or the same length if that column is empty;
    ``optional_run_columns`` have as many, or are empty. ``bounds`` are the minimum and maximum of an integer field, if
    they are not 0 and 2**63 - 1. ``non_finite`` floats may be infinite or NaN. ``long_strings`` are the maximum number
    of bytes of a string field, if it is not ``MAX_STRING_BYTES``. ``added`` are the last fields, which the protocol's
    last version does not have; where they are missing, their defaults hold.
    """

    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    run_lengths: str = ""
    run_columns: tuple[str, ...] = ()
    optional_run_columns: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    non_finite: frozenset[str] = frozenset()
    long_strings: Mapping[str, int] = field(default_factory=dict)
    added: tuple[str, ...] = ()


_NO_RULES = Rules()
_NATURAL = (0, INT64_MAX)
_MANY = 4  # with this many integers or more, it is faster to check them together


def _text(max_bytes: int) -> Checker:
    surely_short = max_bytes // 4  # characters; a character has at most four bytes

    def check(value: Any) -> Any:
        if type(value) is not str:
            raise SchemaError("expected a string")
        if len(value) > surely_short and len(value.encode()) > max_bytes:
            raise SchemaError(f"string longer than {max_bytes} bytes")
        return value

    return check


_short_text = _text(MAX_STRING_BYTES)


def _boolean(value: Any) -> Any:
    if type(value) is not bool:
        raise SchemaError("expected a boolean")
    return value


def _integer(low: int, high: int) -> Checker:
    def check(value: Any) -> Any:
        if type(value) is not int:
            raise SchemaError("expected an integer")
        if not low <= value <= high:
            raise SchemaError("integer out of range")
        return value

    return check


def _number(value: Any) -> Any:
    if type(value) is not float and type(value) is not int:
        raise SchemaError("expected a number")
    return float(value)


def _finite(value: Any) -> Any:
    value = _number(value)
    if not math.isfinite(value):
        raise SchemaError("expected a finite number")
    return value


def _enum(cls: type[StrEnum]) -> Checker:
    members: dict[str, StrEnum] = {member.value: member for member in cls}

    def check(value: Any) -> Any:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise SchemaError(f"expected a {cls.__name__}")
        return member

    return check


def _optional(inner: Checker) -> Checker:
    return lambda value: None if value is None else inner(value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise SchemaError("expected a list")
    return value


def _fixed(inner: tuple[Checker, ...]) -> Checker:
    def check(value: Any) -> Any:
        if len(_list(value)) != len(inner):
            raise SchemaError(f"expected {len(inner)} items")
        return tuple([one(item) for one, item in zip(inner, value, strict=True)])

    return check


def _column(inner: Checker) -> Checker:
    return lambda value: tuple([inner(item) for item in _list(value)])


def _text_column(value: Any) -> Any:
    # join checks every item in C, and accepts only strings
    try:
        "".join(_list(value))
    except TypeError:
        raise SchemaError("expected strings") from None
    if value and max(map(len, value)) > MAX_STRING_BYTES // 4:
        for item in value:
            _short_text(item)
    return tuple(value)


def _integer_column(low: int, high: int) -> Checker:
    def check(value: Any) -> Any:
        if _list(value):
            if [*map(type, value)].count(int) != len(value):
                raise SchemaError("expected integers")
            # no integer of msgpack is below the smallest int64, so one bound is enough
            if max(value) > high or (low > INT64_MIN and min(value) < low):
                raise SchemaError("integer out of range")
        return tuple(value)

    return check


class _Integers:
    """Many integers of a record with the same bounds, checked together."""

    def __init__(self, indexes: tuple[int, ...], bounds: tuple[int, int]) -> None:
        self._pick = itemgetter(*indexes)
        self._kinds = [int] * len(indexes)
        self._low, self._high = bounds

    def are_right(self, values: list[Any]) -> bool:
        """Whether all integers are right. If not, the caller checks them one by one, to name the wrong one."""
        integers = self._pick(values)
        return [*map(type, integers)] == self._kinds and min(integers) >= self._low and max(integers) <= self._high


def _defaults(cls: type, names: tuple[str, ...], added: tuple[str, ...]) -> list[Any]:
    """The defaults of the ``added`` fields, as msgpack gives them."""
    if added and names[-len(added) :] != added:
        raise TypeError(f"the fields that were added to {cls.__name__} are not its last ones")
    found = [one.default for one in fields(cls) if one.name in added] if added else []
    if MISSING in found:
        raise TypeError(f"a field that was added to {cls.__name__} has no default")
    return [_as_unpacked(default) for default in found]


def _as_unpacked(value: Any) -> Any:
    match value:
        case tuple():
            return list(value)
        case StrEnum():
            return value.value
        case _:
            return value


class Schema:
    """Compiles and caches the checkers of dataclasses and named tuples."""

    def __init__(self, rules: Mapping[type, Rules]) -> None:
        self._rules = rules
        self._records: dict[type, Checker] = {}

    def record(self, cls: type) -> Checker:
        """The checker that makes a ``cls`` from the list of its fields, in order.

        Fields that this version has ``added`` may be missing. More fields than ``cls`` has are ignored, because a newer
        version may have added them; a named tuple's fields are fixed.

        Raises: TypeError if an annotation is not supported (at import, never because of a frame).
        """
        known = self._records.get(cls)
        if known is None:
            known = self._records[cls] = self._compile_record(cls)
        return known

    def _compile_record(self, cls: type) -> Checker:
        hints = get_type_hints(cls)
        names = tuple(one.name for one in fields(cls)) if is_dataclass(cls) else tuple(hints)
        rules = self._rules.get(cls, _NO_RULES)
        checks = tuple(
            (
                index,
                name,
                _text(rules.long_strings[name])
                if name in rules.long_strings
                else self._compile(hints[name], rules.bounds.get(name, _NATURAL), name in rules.non_finite),
            )
            for index, name in enumerate(names)
        )
        naturals = tuple(i for i, name in enumerate(names) if hints[name] is int and name not in rules.bounds)
        integers = _Integers(naturals, _NATURAL) if len(naturals) >= _MANY else None
        other_checks = tuple(one for one in checks if one[0] not in naturals)
        arity = len(checks)
        may_grow = is_dataclass(cls)
        defaults = _defaults(cls, names, rules.added)
        columns = tuple(names.index(name) for name in rules.columns)
        optional_columns = tuple(names.index(name) for name in rules.optional_columns)
        run_lengths = names.index(rules.run_lengths) if rules.run_lengths else None
        run_columns = tuple(names.index(name) for name in rules.run_columns)
        optional_run_columns = tuple(names.index(name) for name in rules.optional_run_columns)

        def check(value: Any) -> Any:
            if len(_list(value)) != arity:
                missing = arity - len(value)
                if missing > len(defaults) or (missing < 0 and not may_grow):
                    raise SchemaError(f"expected {arity} fields")
                value = [*value, *defaults[-missing:]] if missing > 0 else value[:arity]
            values = list(value)
            for index, name, one in other_checks if integers is not None and integers.are_right(value) else checks:
                try:
                    values[index] = one(values[index])
                except SchemaError as error:
                    raise SchemaError(f"{name}: {error}") from None
            if columns:
                length = len(values[columns[0]])
                for index in columns:
                    if len(values[index]) != length:
                        raise SchemaError(f"{names[index]}: columns differ in length")
                for index in optional_columns:
                    if values[index] and len(values[index]) != length:
                        raise SchemaError(f"{names[index]}: columns differ in length")
                if run_lengths is not None and values[run_lengths]:
                    length = sum(values[run_lengths])
                for index in run_columns:
                    if len(values[index]) != length:
                        raise SchemaError(f"{names[index]}: columns differ in length")
                for index in optional_run_columns:
                    if values[index] and len(values[index]) != length:
                        raise SchemaError(f"{names[index]}: columns differ in length")
            return cls(*values)

        return check

    def _compile(self, hint: Any, bounds: tuple[int, int], non_finite: bool) -> Checker:
        if hint is str:
            return _short_text
        if hint is bool:
            return _boolean
        if hint is int:
            return _integer(*bounds)
        if hint is float:
            return _number if non_finite else _finite
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                if arguments[0] is str:
                    return _text_column
                if arguments[0] is int:
                    return _integer_column(*bounds)
                return _column(self._compile(arguments[0], bounds, non_finite))
            return _fixed(tuple(self._compile(one, bounds, non_finite) for one in arguments))
        if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
            inner = arguments[0] if arguments[1] is type(None) else arguments[1]
            return _optional(self._compile(inner, bounds, non_finite))
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return _enum(hint)
        if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, tuple)):
            return self.record(hint)
        raise TypeError(f"the wire has no form for {hint!r}")
