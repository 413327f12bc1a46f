"""Log-probabilities of tokens, as chats and responses show them."""

from collections.abc import Sequence

from actorserve.http.answers.answer_format import Json
from actorserve.http.answers.choice import AnswerToken
from actorserve.http.openai.chunks import finite
from actorserve.model_files.tokenizer import Tokenizer


def shown_logprobs(tokens: Sequence[AnswerToken], tokenizer: Tokenizer) -> list[Json]:
    """One object per token, with the likeliest tokens in its place."""
    return [_token(token, tokenizer) for token in tokens]


def _token(token: AnswerToken, tokenizer: Tokenizer) -> Json:
    known = token.logprobs
    if known is None:
        return _entry(token.token_id, float("-inf"), tokenizer) | {"top_logprobs": []}
    best = zip(known.top_token_ids, known.top_logprobs, strict=True)
    return _entry(token.token_id, known.logprob, tokenizer) | {
        "top_logprobs": [_entry(token_id, logprob, tokenizer) for token_id, logprob in best]
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}
