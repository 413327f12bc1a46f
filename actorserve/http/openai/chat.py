"""The choices in answers of ``/v1/chat/completions``."""

from collections.abc import Sequence

from actorserve.core.messages import FinishReason
from actorserve.http.answers.answer_format import Json, WholeChoice, finite
from actorserve.http.answers.choice import AnswerToken, Piece
from actorserve.model_files.tokenizer import Tokenizer


class ChatFormat:
    """The ``AnswerFormat`` of chats. A choice's first chunk has the role, and its last chunk the finish reason."""

    chunk_type = "chat.completion.chunk"
    answer_type = "chat.completion"

    def __init__(self, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs

    def opening(self, index: int) -> Json:
        return _chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Json:
        return _chunk(index, {"content": piece.text}, self._logprobs(piece.tokens))

    def finish(self, index: int, reason: FinishReason) -> Json:
        return _chunk(index, {}, finish_reason=reason)

    def whole(self, index: int, choice: WholeChoice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: AnswerToken) -> Json:
        known = token.logprobs
        if known is None:
            return self._entry(token.token_id, float("-inf")) | {"top_logprobs": []}
        best = zip(known.top_token_ids, known.top_logprobs, strict=True)
        return self._entry(token.token_id, known.logprob) | {
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in best]
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(token_id))}


def _chunk(index: int, delta: Json, logprobs: Json | None = None, finish_reason: FinishReason | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
