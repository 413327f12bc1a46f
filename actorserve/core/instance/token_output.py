"""How an instance sends tokens to gateways: one message to each gateway, one row for each request's run of tokens.

A row with its prompt's log-probabilities is sent in a message of its own, because several such rows could exceed the
size that a message may have.
"""

from collections.abc import Iterable

from actorserve.core.effects import Effects
from actorserve.core.messages import Peer, PromptLogprobs, TokenLogprobs, Tokens
from actorserve.core.request import Request

Run = tuple[Request, int, int]
"""A request, the output position of one of its tokens that was made here, and how many tokens to send from there on."""


def send_tokens(runs: Iterable[Run], effects: Effects) -> None:
    """Send these tokens to their requests' gateways. Each request's tokens are sent in this order. A run without a
    positive number of tokens is left out.
    """
    runs_of: dict[Peer, list[Run]] = {}
    for run in runs:
        request, position, num_tokens = run
        if position == 0 and num_tokens > 0 and request.prompt_scores is not None:
            effects.send(request.gateway, _tokens([(request, 0, 1)], (request.prompt_scores.whole(),)))
            run, num_tokens = (request, 1, num_tokens - 1), num_tokens - 1
        if num_tokens > 0:
            gateway_runs = runs_of.get(request.gateway)
            if gateway_runs is None:
                gateway_runs = runs_of[request.gateway] = []
            gateway_runs.append(run)
    for gateway, gateway_runs in runs_of.items():
        effects.send(gateway, _tokens(gateway_runs))


def _tokens(runs: list[Run], prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()) -> Tokens:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    has_longer_runs = False
    for request, position, num_tokens in runs:
        first = position + request.num_prompt
        first_logprobs = position - request.resumed_output
        if num_tokens == 1:
            token_ids.append(request.token_ids[first])
            logprobs.append(request.logprobs[first_logprobs])
        else:
            has_longer_runs = True
            token_ids += request.token_ids[first : first + num_tokens]
            logprobs += request.logprobs[first_logprobs : first_logprobs + num_tokens]
    positions = tuple([position for _, position, _ in runs])
    cached: tuple[int, ...] = ()
    waited_s: tuple[float, ...] = ()
    if 0 in positions:
        waited_s = tuple([request.waited_s if position == 0 else 0.0 for request, position, _ in runs])
        cached = tuple([request.num_cached_tokens or 0 if position == 0 else 0 for request, position, _ in runs])
    return Tokens(
        request_ids=tuple([request.request_id for request, _, _ in runs]),
        epochs=tuple([request.epoch for request, _, _ in runs]),
        positions=positions,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if any(logprobs) else (),
        num_cached_tokens=cached if any(cached) else (),
        prompt_logprobs=prompt_logprobs,
        run_lengths=tuple([num_tokens for _, _, num_tokens in runs]) if has_longer_runs else (),
        waited_s=waited_s if any(waited_s) else (),
    )
