"""What is known of one client's request: noted by the parts of the server, and told by its line in the log."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.types import Scope

from actorserve.core.messages import Energy, FinishReason

_SCOPE_KEY: Final = "actorserve.record"


class Measured(Protocol):
    """What is known of one worker request (``http.metrics.request_meter``)."""

    @property
    def model(self) -> str: ...
    @property
    def begun_s(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def queued_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def reason(self) -> FinishReason | None: ...
    @property
    def energy(self) -> Energy | None: ...
    @property
    def workers(self) -> Collection[str]: ...


@dataclass(slots=True)
class Record:
    """What is known of one client's request so far.

    ``status``: of the answer; None before it begins. ``is_complete``: all of it was sent. ``error`` and ``error_code``:
    why there is no (whole) answer. ``choices``: the requests that workers got for it.
    """

    key: str | None = None
    status: int | None = None
    is_stream: bool = False
    is_complete: bool = False
    error: str | None = None
    error_code: str | None = None
    choices: Collection[Measured] = field(default_factory=list)


def record_of(scope: Scope) -> Record:
    """The record of the request of this scope."""
    record: Record = scope.setdefault(_SCOPE_KEY, Record())
    return record
