"""Messages about one request: between its gateway and its worker, and from its client to the gateway's core."""

from actorserve.core.messages.transfers import Transfer
from actorserve.core.messages.value import value
from actorserve.core.messages.values import (
    NEWCOMER,
    Attained,
    Energy,
    FinishReason,
    Peer,
    PromptLogprobs,
    RequestSpec,
    TokenLogprobs,
)


@value
class Start:
    """g -> w: own this request under ``epoch``. A repeat is answered again; an older epoch is dropped.

    ``transfer`` copied KV of the request to the receiver: the last owner handed it over, or died after a checkpoint.
    The receiver hands the request over to ``token_instance``, if there is one, once the prompt is computed.
    """

    epoch: int
    request: RequestSpec
    attained: Attained = NEWCOMER
    transfer: Transfer | None = None
    token_instance: Peer | None = None


@value
class Started:
    """w -> g: the worker owns the request, which is queued or running."""

    request_id: str
    epoch: int


@value
class Tokens:
    """w -> g: new tokens, or tokens that are sent again, of a gateway's requests, as parallel columns.

    A row is a run of tokens of one request, from output position ``positions[row]`` on (0 is the first generated
    token). ``run_lengths`` is empty if each row has one token, as after one iteration. Runs are longer if a message has
    the output of several iterations, or tokens that are sent again. ``token_ids`` has the tokens of all rows, one row
    after the other, and so has ``logprobs`` if it is not empty. ``num_cached_tokens`` is empty, or has the number of
    prompt tokens found in the prefix cache in each row of position 0, and 0 in other rows. ``prompt_logprobs`` is
    empty, or has the entries of all of the prompt's tokens in each row of position 0 whose request wants them, and None
    in other rows. ``waited_s`` is empty, or has in each row of position 0 how long the request waited at the worker for
    its first iteration, and 0 in other rows.
    """

    request_ids: tuple[str, ...]
    epochs: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: tuple[int, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
    run_lengths: tuple[int, ...] = ()
    waited_s: tuple[float, ...] = ()


@value
class Finished:
    """w -> g: no more tokens; ``num_output_tokens`` is their total. Repeated until the gateway releases the request.

    ``energy`` is what the worker spent on the request; None if it does not know that.
    """

    request_id: str
    epoch: int
    reason: FinishReason
    num_output_tokens: int
    energy: Energy | None = None


@value
class Release:
    """g -> w: forget the request under this and any older epoch, and free its blocks.

    One message serves every ending: the acknowledgement of Finished, a stop string, a client that left, and the fencing
    of an owner that was thought dead. ``is_complete``: a stop string has ended the answer, so that the worker may learn
    the output's length, as it does from answers that end there.
    """

    request_id: str
    epoch: int
    is_complete: bool = False


@value
class Resend:
    """g -> w: send the tokens again, from output position ``from_position`` on."""

    request_id: str
    epoch: int
    from_position: int


@value
class Open:
    """Local: a client's request has arrived."""

    request: RequestSpec


@value
class Close:
    """Local: the client wants nothing more of the request: it left, or the answer ``is_complete``, because a stop
    string ended the text.
    """

    request_id: str
    is_complete: bool = False
