"""Reads and writes profiles as small TOML files, which a person can read and edit. Reading is strict.

``core.timing.profile`` says what the values mean, and ``profile_text`` shows where each of them stands. These may be
missing, because older files do not have them, and are then 0: ``prefill.weights_s``, ``decode.mixed_s``, and the table
``pause`` with ``seconds`` and ``row_s``. ``source`` and the table ``errors`` may be missing as well.

The error for a wrong file is one line with the file, the key, and the expected value. ``config/profiles`` holds
published profiles. Workers keep the profiles that they measure in the cache's ``profiles`` folder.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from actorserve.core.power.curves import CURVES, PhaseCurves, measured_curves
from actorserve.core.timing.profile import CapSweep, Curve, Link, Profile
from actorserve.errors import NOT_TOML, ProfileError

_MAX_SECONDS = 3600.0  # a longer iteration is surely a wrong unit
_MAX_COUNT = 1e9  # of tokens or requests
_MAX_POINTS = 256
BYTES_PER_S_BOUNDS = (1e3, 1e15)
MAX_DRIFT = 0.1  # of the machine's speed while a profile was measured


class MeasuredShape(NamedTuple):
    """An iteration that a profile was fitted to or compared with, for people who doubt the fit.

    It prefilled ``tokens`` after ``before`` tokens, and decoded ``requests`` with ``context`` tokens each. ``seconds``
    is the median of its times, and ``spread`` half the distance between their quartiles, relative to the median.
    """

    tokens: int
    before: int
    requests: int
    context: int
    seconds: float
    spread: float


def load_profile(file: Path) -> Profile:
    """Raises: ProfileError, in one line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read a profile from {file}: {error}") from None
    return parse_profile(text, str(file))


def load_power_curves(setting: str) -> PhaseCurves:
    """The shipped curves of time against power cap of this name, else those that were measured for the profile at this
    path.

    Raises: ProfileError, in one line.
    """
    if setting in CURVES:
        return CURVES[setting]
    caps = load_profile(Path(setting)).caps
    if caps is None:
        raise ProfileError(f"{setting}: power.curves needs a table [caps], which tools/profile --caps writes")
    try:
        return measured_curves(caps)
    except ValueError as error:
        raise ProfileError(f"{setting}: caps: {error}") from None


def parse_profile(text: str, place: str) -> Profile:
    """``place`` names the text in errors. Raises: ProfileError, in one line."""
    try:
        values = tomllib.loads(text)
    except NOT_TOML as error:
        raise ProfileError(f"{place}: not TOML: {error}") from None
    top = _Table(values, place, "")
    prefill, decode = top.table("prefill"), top.table("decode")
    context = top.table("decode_context")
    pause = top.table("pause") if "pause" in values else None
    prefill_s, decode_s = prefill.curve("tokens", least_x=1.0), decode.curve("requests", least_x=1.0)
    profile = Profile(
        name=top.text("name"),
        model=top.text("model"),
        hardware=top.text("hardware"),
        dtype=top.text("dtype"),
        threads=top.integer("threads", 0, 65536),
        kv_bytes_per_token=top.integer("kv_bytes_per_token", 1, 10**9),
        num_layers=top.integer("num_layers", 1, 10**4) if "num_layers" in values else 1,
        prefill=prefill_s,
        prefill_context_s=prefill.number("context_s", 0.0, 1.0),
        weights_s=prefill.optional_number("weights_s", 0.0, min(prefill_s.ys[0], decode_s.ys[0])),
        decode=decode_s,
        decode_mixed_s=decode.optional_number("mixed_s", 0.0, 1.0),
        decode_context=context.curve("tokens", least_x=0.0, may_be_zero=True),
        swap=top.table("swap").link(),
        transfer=top.table("transfer").link(),
        pause_s=pause.number("seconds", 0.0, _MAX_SECONDS) if pause else 0.0,
        pause_row_s=pause.number("row_s", 0.0, 1.0) if pause else 0.0,
        source=top.text("source") if "source" in values else "",
        errors=top.table("errors").errors() if "errors" in values else (),
        caps=top.table("caps").caps() if "caps" in values else None,
    )
    if "measured" in values:
        top.table("measured").measured_shapes()
    for table in (top, *top.tables):
        table.refuse_unknown()
    return profile


def drift_of(profile: Profile) -> float:
    """By how much the machine was faster in some part of the measurement than in another; 0 if that is not known."""
    return dict(profile.errors).get("drift", 0.0)


def require_steady(profile: Profile, place: Path) -> None:
    """Raises: ProfileError, if the machine's speed drifted while the profile was measured."""
    drift = drift_of(profile)
    if drift > MAX_DRIFT:
        raise ProfileError(
            f"{place}: errors.drift is {drift:g}: expected at most {MAX_DRIFT:g}, because the machine's speed changed "
            "while the profile was measured; measure it again when the machine has no other work"
        )


def profile_text(profile: Profile, measured: Sequence[MeasuredShape] = ()) -> str:
    """The file's text; ``parse_profile`` gives an equal profile back."""
    lines = [f"{key} = {json.dumps(getattr(profile, key))}" for key in ("name", "model", "hardware", "dtype")]
    lines += [f"threads = {profile.threads}", f"kv_bytes_per_token = {profile.kv_bytes_per_token}"]
    if profile.num_layers > 1:
        lines.append(f"num_layers = {profile.num_layers}")
    if profile.source:
        lines.append(f"source = {json.dumps(profile.source)}")
    lines += ["", "[prefill]  # an iteration, by the tokens of one prompt", *_points("tokens", profile.prefill)]
    lines += [f"context_s = {_number(profile.prefill_context_s)}  # added per pair of a token and one before its chunk"]
    lines += [f"weights_s = {_number(profile.weights_s)}  # to read the weights: the least cost of a further chunk"]
    lines += ["", "[decode]  # an iteration, by its requests, without their context"]
    lines += [*_points("requests", profile.decode)]
    lines += [f"mixed_s = {_number(profile.decode_mixed_s)}  # added per decode if the iteration also prefills"]
    lines += ["", "[decode_context]  # added for context, by the tokens of all requests together"]
    lines += _points("tokens", profile.decode_context)
    for name, link in (("swap", profile.swap), ("transfer", profile.transfer)):
        to = "KV to host memory, and back" if name == "swap" else "KV to another instance"
        lines += ["", f"[{name}]  # {to}", f"latency_s = {_number(link.latency_s)}"]
        lines.append(f"bytes_per_s = {_number(link.bytes_per_s)}")
    lines += ["", "[pause]  # between two iterations; row_s: added per request of the second one"]
    lines += [f"seconds = {_number(profile.pause_s)}", f"row_s = {_number(profile.pause_row_s)}"]
    if profile.errors:
        lines += ["", "[errors]  # of the fit, relative to the measurements"]
        lines += [f"{name} = {_number(error)}" for name, error in profile.errors]
    if profile.caps is not None:
        lines += ["", "[caps]  # iterations of a prompt and of decodes under power caps"]
        lines.append(f"source = {json.dumps(profile.caps.source)}")
        for name in _CAP_COLUMNS:
            lines.append(f"{name} = [{', '.join(map(_number, getattr(profile.caps, name)))}]")
    if measured:
        lines += ["", "[measured]  # each iteration: its prefill after earlier tokens, its decodes and their context"]
        for column, name in zip(zip(*measured, strict=True), MeasuredShape._fields, strict=True):
            lines.append(f"{name} = [{', '.join(map(_number, column))}]")
    return "\n".join(lines) + "\n"


def save_profile(profile: Profile, file: Path, heading: str = "", measured: Sequence[MeasuredShape] = ()) -> None:
    """Write the whole file, or nothing; ``heading`` becomes comment lines at its top.

    Raises: OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix="partial-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(comment + ("\n" if comment else "") + profile_text(profile, measured))
        os.replace(partial, file)
    finally:
        with suppress(FileNotFoundError):  # it was renamed to ``file``
            os.unlink(partial)


def require_profile_of(profile: Profile, place: Path, model: str, kv_bytes_per_token: int) -> None:
    """Raises: ProfileError, if the profile belongs to another model, or to one with another KV size."""
    if profile.model != model:
        raise ProfileError(f"{place}: model is {profile.model!r}: expected {model!r}, the served model")
    if profile.kv_bytes_per_token != kv_bytes_per_token:
        raise ProfileError(
            f"{place}: kv_bytes_per_token is {profile.kv_bytes_per_token}: expected {kv_bytes_per_token}, "
            "the engine's number (another dtype, or another model of the same name?)"
        )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1e6 else repr(float(value)) if value != round(value) else repr(round(value))


def _points(name: str, curve: Curve) -> list[str]:
    return [
        f"{name} = [{', '.join(_number(x) for x in curve.xs)}]",
        f"seconds = [{', '.join(_number(y) for y in curve.ys)}]",
    ]


_CAP_COLUMNS: Final = ("caps_watts", "prompt_s", "token_s", "prompt_watts", "token_watts")


class _Table:
    """One table of the file. It returns checked values, and remembers the names that were read."""

    def __init__(self, values: Mapping[str, Any], place: str, name: str) -> None:
        self.tables: list[_Table] = []
        self._values = values
        self._place = place
        self._prefix = f"{name}." if name else ""
        self._known: set[str] = set()

    def table(self, name: str) -> "_Table":
        value = self._get(name, "a table")
        if not isinstance(value, dict):
            raise self._error(name, value, "a table")
        table = _Table(value, self._place, name)
        self.tables.append(table)
        return table

    def text(self, name: str) -> str:
        value = self._get(name, "a text")
        if not isinstance(value, str) or not value.strip():
            raise self._error(name, value, "a text")
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        expected = f"a whole number from {least} to {most}"
        value = self._get(name, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._error(name, value, expected)
        return value

    def number(self, name: str, least: float, most: float) -> float:
        return self._check(name, self._get(name, _range(least, most)), least, most)

    def optional_number(self, name: str, least: float, most: float) -> float:
        """0 if it is missing."""
        self._known.add(name)
        return self.number(name, least, most) if name in self._values else 0.0

    def curve(self, x_name: str, least_x: float, may_be_zero: bool = False) -> Curve:
        xs = self._array(x_name, least_x, _MAX_COUNT)
        ys = self._array("seconds", 0.0, _MAX_SECONDS)
        if len(xs) != len(ys):
            raise self._wrong("seconds", f"{len(ys)} numbers", f"{len(xs)}, one per entry of {x_name}")
        for place, (left, right) in enumerate(pairwise(xs), 1):
            if right <= left:
                raise self._error(f"{x_name}[{place}]", right, f"more than {left:g}, the number before it")
        for place, (left, right) in enumerate(pairwise(ys), 1):
            if right < left:
                raise self._error(f"seconds[{place}]", right, f"at least {left:g}, the time for less work")
        if ys[0] == 0.0 and not may_be_zero:
            raise self._error("seconds[0]", 0, "more than 0: the shortest iteration is the scheduler's first quantum")
        return Curve(xs, ys)

    def link(self) -> Link:
        return Link(self.number("latency_s", 0.0, _MAX_SECONDS), self.number("bytes_per_s", *BYTES_PER_S_BOUNDS))

    def measured_shapes(self) -> None:
        """Check columns of equal lengths."""
        columns = [self._array(name, 0.0, _MAX_COUNT, least_length=1) for name in MeasuredShape._fields]
        for name, column in zip(MeasuredShape._fields, columns, strict=True):
            if len(column) != len(columns[0]):
                raise self._wrong(name, f"{len(column)} numbers", f"{len(columns[0])}, one for each iteration")

    def caps(self) -> CapSweep:
        columns = [self._array(name, 0.0, _MAX_COUNT) for name in _CAP_COLUMNS]
        for name, column in zip(_CAP_COLUMNS, columns, strict=True):
            if len(column) != len(columns[0]):
                raise self._wrong(name, f"{len(column)} numbers", f"{len(columns[0])}, one for each cap")
        caps_watts, prompt_s, token_s, prompt_watts, token_watts = columns
        return CapSweep(caps_watts, prompt_s, token_s, prompt_watts, token_watts, self.text("source"))

    def errors(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, self.number(name, 0.0, 1e3)) for name in self._values)

    def refuse_unknown(self) -> None:
        for name in self._values:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise ProfileError(f"{self._place}: {self._prefix}{name} is unknown: expected {known}")

    def _array(self, name: str, least: float, most: float, least_length: int = 2) -> tuple[float, ...]:
        expected = f"a list of {least_length} to {_MAX_POINTS} numbers"
        values = self._get(name, expected)
        if not isinstance(values, list):
            raise self._error(name, values, expected)
        if not least_length <= len(values) <= _MAX_POINTS:
            raise self._wrong(name, f"a list of {len(values)}", expected)
        return tuple(self._check(f"{name}[{place}]", value, least, most) for place, value in enumerate(values))

    def _check(self, name: str, value: object, least: float, most: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]
            raise self._error(name, value, _range(least, most))
        return float(value)  # type: ignore[arg-type]

    def _get(self, name: str, expected: str) -> Any:
        self._known.add(name)
        if name not in self._values:
            raise ProfileError(f"{self._place}: {self._prefix}{name} is missing: expected {expected}")
        return self._values[name]

    def _error(self, name: str, value: object, expected: str) -> ProfileError:
        return self._wrong(name, repr(value)[:80], expected)

    def _wrong(self, name: str, what: str, expected: str) -> ProfileError:
        return ProfileError(f"{self._place}: {self._prefix}{name} is {what}: expected {expected}")


def _range(least: float, most: float) -> str:
    return f"a number from {least:g} to {most:g}"
