"""The form of answers of ``/v1/chat/completions``."""

from collections.abc import Sequence

from starlette.responses import Response

from actorserve.core.messages import FinishReason
from actorserve.http.answers.answer_format import Json, WholeChoice
from actorserve.http.answers.choice import AnswerToken, Choice, Piece
from actorserve.http.answers.usage import Usage
from actorserve.http.errors import RequestFailedError
from actorserve.http.openai.chunks import AnswerHead, Chunks, finite
from actorserve.http.requests.fields import StreamOptions
from actorserve.model_files.tokenizer import Tokenizer


class ChatFormat:
    """The ``AnswerFormat`` of chats. A choice's first chunk has the role, and its last chunk the finish reason."""

    def __init__(
        self, head: AnswerHead, usage: Usage, options: StreamOptions, tokenizer: Tokenizer, wants_logprobs: bool
    ) -> None:
        self._chunks = Chunks(head, usage, options, chunk_type="chat.completion.chunk", answer_type="chat.completion")
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._opened: set[int] = set()  # choices whose first chunk was written

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        delta = {"content": piece.text}
        return self._opening(choice.index) + self._chunk(choice.index, delta, self._logprobs(piece.tokens))

    def finish(self, choice: Choice) -> bytes:
        assert choice.end is not None
        return self._opening(choice.index) + self._chunk(choice.index, {}, finish_reason=choice.end.reason)

    def keep_alive(self) -> bytes:
        return self._chunks.keep_alive()

    def end(self) -> bytes:
        return self._chunks.end()

    def fail(self, failure: RequestFailedError) -> bytes:
        return self._chunks.fail(failure)

    def refusal(self, failure: RequestFailedError) -> Response:
        return self._chunks.refusal(failure)

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        return self._chunks.whole([self._whole(index, choice) for index, choice in enumerate(choices)])

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: FinishReason | None = None
    ) -> bytes:
        return self._chunks.chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _whole(self, index: int, choice: WholeChoice) -> Json:
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
