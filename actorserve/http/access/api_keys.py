"""API keys and the priorities that they allow: a TOML file that only its owner may read.

The file holds the SHA-256 hashes of keys and not the keys, so a reader of the file cannot use them. That is enough for
random keys; a password chosen by a person could be guessed from its hash.
"""

import hashlib
import hmac
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actorserve.errors import NOT_TOML, SettingsError
from actorserve.local_trust import open_plain

_HASH_OF_NOTHING = hashlib.sha256(b"").digest()

Limit = Annotated[int, Field(ge=1, le=10**12, strict=True)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1, strict=True)]


class KeyRole(StrEnum):
    """What a key is for: users' keys make requests, viewers' keys watch the server, and operators' keys do both."""

    USER = "user"
    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``priority`` is for requests without one; ``best_priority`` is the most urgent one that a request may have.

    At most ``max_open_requests`` may be open at once on one host. In a minute the key may send ``requests_per_minute``
    requests there, and use ``tokens_per_minute`` tokens of prompts and outputs. None: any number.
    """

    name: str
    digest: bytes
    priority: int
    best_priority: int
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    role: KeyRole = KeyRole.USER


class ApiKeys:
    """All valid keys. ``file``: where they were read from."""

    def __init__(self, keys: Sequence[ApiKey], file: Path | None = None) -> None:
        self._keys = tuple(keys)
        self._file = file

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> None:
        """Read the file again; requests that have begun go on. Nothing happens without a file.

        Raises: SettingsError, as ``read_api_keys``; then the keys stay as they were.
        """
        if self._file is not None:
            self._keys = read_api_keys(self._file)._keys

    def find(self, secret: bytes) -> ApiKey | None:
        """The key with this secret. The duration of the search reveals nothing about the keys."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    priority: Priority = 0
    best_priority: Priority | None = None
    max_open_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    role: KeyRole = KeyRole.USER

    @model_validator(mode="after")
    def _is_sensible(self) -> Self:
        if bytes.fromhex(self.sha256) == _HASH_OF_NOTHING:
            raise ValueError("sha256 is the hash of an empty text")
        if self.best_priority is not None and self.best_priority > self.priority:
            raise ValueError("best_priority must not be above priority (lower is more urgent)")
        return self

    def key(self) -> ApiKey:
        best = self.priority if self.best_priority is None else self.best_priority
        return ApiKey(
            self.name,
            bytes.fromhex(self.sha256),
            self.priority,
            best,
            self.max_open_requests,
            self.requests_per_minute,
            self.tokens_per_minute,
            self.role,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: list[_Entry] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_different(self) -> Self:
        for values, what in (
            ([entry.name for entry in self.key], "name"),
            ([entry.sha256.lower() for entry in self.key], "sha256"),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {what}")
        return self


def read_api_keys(file: Path) -> ApiKeys:
    """Read a file of ``[[key]]`` tables: ``name``, ``sha256`` (hexadecimal), ``priority`` (default 0),
    ``best_priority`` (default: ``priority``), ``max_open_requests``, ``requests_per_minute`` and ``tokens_per_minute``
    (default: no limit), and ``role`` (default: ``user``).

    Raises: SettingsError, in one line that repeats nothing of the file except the names of wrong fields. Also raised if
    users other than the file's owner may read or write it, or if its owner is neither this user nor root.
    """
    try:
        with open_plain(file) as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid not in (0, os.geteuid()):
                raise SettingsError(f"the file of API keys {file} must belong to this user or to root")
            if status.st_mode & 0o077:
                raise SettingsError(f"not only its owner may read or write the API keys in {file}; chmod 600 it")
            values = tomllib.load(opened)
    except OSError as error:
        raise SettingsError(f"cannot read API keys from {file}: {error.strerror}") from None
    except NOT_TOML as error:
        line = f": {error}" if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise SettingsError(f"the API keys in {file} are not valid TOML{line}") from None
    try:
        return ApiKeys([entry.key() for entry in _File.model_validate(values).key], file)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_context=False, include_url=False)[:10]
        )
        raise SettingsError(f"the API keys in {file}: {problems}") from None
