"""Answers of ``/v1/chat/completions``."""

from collections.abc import Sequence

from actorserve.core.messages import FinishReason
from actorserve.http.answer_format import AnswerHead, Json, WholeChoice, finite
from actorserve.http.choice import AnswerToken, Piece
from actorserve.model_files.tokenizer import Tokenizer


class ChatFormat:
    """A ``chat.completion``, or its chunks: the first of each choice names the role, the last the reason."""

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer

    def opening(self, index: int) -> Json:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> Json:
        return self._chunk(index, {"content": piece.text}, self._logprobs(piece.tokens))

    def finish(self, index: int, reason: FinishReason) -> Json:
        return self._chunk(index, {}, finish_reason=reason)

    def usage(self, usage: Json) -> Json:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, choices: Sequence[WholeChoice], usage: Json) -> Json:
        return self._envelope(
            "chat.completion",
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                    "logprobs": self._logprobs(choice.tokens),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
        ) | {"usage": usage}

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: FinishReason | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        head = self._head
        return {
            "id": head.answer_id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._head.wants_logprobs:
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
