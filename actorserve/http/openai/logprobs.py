"""Tokens and their log-probabilities, as answers show them."""

from collections.abc import Callable, Sequence

from actorserve.http.answers.answer_format import Json
from actorserve.http.answers.choice import AnswerToken
from actorserve.http.openai.chunks import finite
from actorserve.model_files.tokenizer import Tokenizer


def token_namer(tokenizer: Tokenizer, *, as_token_ids: bool) -> Callable[[int], str]:
    """What shows a token, given its id: its text, or a name with the id, because texts are not unique."""
    return "token_id:{}".format if as_token_ids else tokenizer.token_text


def output_ids(tokens: Sequence[AnswerToken]) -> list[int]:
    """The ids of the tokens that the model made, without those of a repeated prompt."""
    return [token.token_id for token in tokens if not token.is_echo]


def shown_logprobs(tokens: Sequence[AnswerToken], tokenizer: Tokenizer, *, as_token_ids: bool = False) -> list[Json]:
    """One object per token, with the likeliest tokens in its place."""
    name = token_namer(tokenizer, as_token_ids=as_token_ids)

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": name(token_id), "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    def shown(token: AnswerToken) -> Json:
        known = token.logprobs
        if known is None:
            return entry(token.token_id, float("-inf")) | {"top_logprobs": []}
        best = zip(known.top_token_ids, known.top_logprobs, strict=True)
        return entry(token.token_id, known.logprob) | {"top_logprobs": [entry(*pair) for pair in best]}

    return [shown(token) for token in tokens]
