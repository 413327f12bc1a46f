"""Messages: a request's life on a worker, and a client's with its gateway."""

from dataclasses import dataclass

from actorserve.core.messages.values import NEWCOMER, Attained, FinishReason, MigrationId, RequestSpec, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Start:
    """g -> w: own this request under ``epoch``. A repeat is answered again; an older epoch is dropped.

    ``migration``: its last owner handed it over, and its KV was copied here under this name.
    """

    epoch: int
    request: RequestSpec
    attained: Attained = NEWCOMER
    migration: MigrationId | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """w -> g: the request is mine (queued or running)."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """w -> g: one iteration's output for all of a gateway's requests, as parallel columns.

    ``positions`` are output positions (0 is the first generated token). ``logprobs`` is empty, or one entry a row.
    ``num_cached_tokens`` is empty, or says at each row of position 0 how many of the prompt's tokens were found in the
    prefix cache (0 at other rows).
    """

    request_ids: tuple[str, ...]
    epochs: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """w -> g: no more tokens; ``num_output_tokens`` were made in all. Repeated until the gateway releases it."""

    request_id: str
    epoch: int
    reason: FinishReason
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Release:
    """g -> w: I want nothing more of this request at this or any older epoch: forget it and free its blocks.

    One message for every ending: the acknowledgement of Finished, a stop string, a client that left, and the fencing
    of an owner that was thought dead.
    """

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Resend:
    """g -> w: tokens from output position ``from_position`` on never arrived."""

    request_id: str
    epoch: int
    from_position: int


@dataclass(frozen=True, slots=True)
class Open:
    """Local: a client's request has come."""

    request: RequestSpec


@dataclass(frozen=True, slots=True)
class Close:
    """Local: the client wants nothing more (it left, or a stop string ended the text)."""

    request_id: str
