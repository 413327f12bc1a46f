"""How an instance sends tokens to gateways: one message to each gateway, one row for each token.

A row with its prompt's log-probabilities is sent in a message of its own, because several such rows could exceed the
size that a message may have.
"""

from collections.abc import Iterable

from actorserve.core.effects import Effects
from actorserve.core.messages import Peer, PromptLogprobs, Tokens
from actorserve.core.request import Request

Row = tuple[Request, int]
"""A request, and the output position of one of its tokens that was made here."""


def send_tokens(rows: Iterable[Row], effects: Effects) -> None:
    """Send these tokens to their requests' gateways. Each request's tokens are sent in this order."""
    rows_of: dict[Peer, list[Row]] = {}
    for row in rows:
        request, position = row
        if position == 0 and request.prompt_scores is not None:
            effects.send(request.gateway, _tokens([row], (request.prompt_scores.whole(),)))
        else:
            rows_of.setdefault(request.gateway, []).append(row)
    for gateway, gateway_rows in rows_of.items():
        effects.send(gateway, _tokens(gateway_rows))


def _tokens(rows: list[Row], prompt_logprobs: tuple[PromptLogprobs, ...] = ()) -> Tokens:
    positions = tuple(position for _, position in rows)
    logprobs = tuple(request.logprobs[position - request.resumed_output] for request, position in rows)
    cached: tuple[int, ...] = ()
    if 0 in positions:
        cached = tuple(request.num_cached_tokens or 0 if position == 0 else 0 for request, position in rows)
    return Tokens(
        request_ids=tuple(request.request_id for request, _ in rows),
        epochs=tuple(request.epoch for request, _ in rows),
        positions=positions,
        token_ids=tuple(request.token_ids[request.num_prompt + position] for request, position in rows),
        logprobs=logprobs if any(logprobs) else (),
        num_cached_tokens=cached if any(cached) else (),
        prompt_logprobs=prompt_logprobs,
    )
