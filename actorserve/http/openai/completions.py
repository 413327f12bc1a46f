"""The form of answers of ``/v1/completions``."""

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


class CompletionFormat:
    """The ``AnswerFormat`` of completions. Chunks and whole answers have one type, and a stream begins with text."""

    def __init__(
        self, head: AnswerHead, usage: Usage, options: StreamOptions, tokenizer: Tokenizer, wants_logprobs: bool
    ) -> None:
        self._chunks = Chunks(head, usage, options, chunk_type="text_completion", answer_type="text_completion")
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._chunks.chunk(self._choice(choice.index, piece.text, piece.tokens, None))

    def finish(self, choice: Choice) -> bytes:
        assert choice.end is not None
        return self._chunks.chunk(
            {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.end.reason}
        )

    def keep_alive(self) -> bytes:
        return self._chunks.keep_alive()

    def end(self) -> bytes:
        return self._chunks.end()

    def fail(self, failure: RequestFailedError) -> bytes:
        return self._chunks.fail(failure)

    def refusal(self, failure: RequestFailedError) -> Response:
        return self._chunks.refusal(failure)

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        return self._chunks.whole(
            [
                self._choice(index, "".join(choice.text), choice.tokens, choice.finish_reason)
                for index, choice in enumerate(choices)
            ]
        )

    def _choice(self, index: int, text: str, tokens: Sequence[AnswerToken], reason: FinishReason | None) -> Json:
        logprobs = self._logprobs(tokens) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json:
        """Columns over the tokens; ``text_offset`` counts characters from the start of the choice's text."""
        return {
            "text_offset": [token.offset for token in tokens],
            "tokens": [self._tokenizer.token_text(token.token_id) for token in tokens],
            "token_logprobs": [finite(token.logprobs.logprob) if token.logprobs else None for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
        }

    def _best(self, token: AnswerToken) -> Json | None:
        """The best tokens at this position and the chosen one, by text. If texts are equal, the likeliest counts."""
        known = token.logprobs
        if known is None:
            return None
        best: dict[str, float] = {}
        pairs = [*zip(known.top_token_ids, known.top_logprobs, strict=True), (token.token_id, known.logprob)]
        for token_id, logprob in pairs:
            text = self._tokenizer.token_text(token_id)
            best[text] = max(finite(logprob), best.get(text, float("-inf")))
        return best
