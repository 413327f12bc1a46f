"""The form of answers of ``/v1/completions``."""

from collections.abc import Iterator, Sequence

from actorserve.core.messages import FinishReason
from actorserve.http.answers.answer_format import Json, WholeChoice
from actorserve.http.answers.choice import AnswerToken, Choice, Piece
from actorserve.http.answers.usage import Usage
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.openai.chunks import AnswerHead, ChunkFormat, finite
from actorserve.http.openai.completions.requests import CompletionRequest
from actorserve.http.openai.logprobs import output_ids, token_namer
from actorserve.http.openai.prompt_logprobs import prompt_logprobs_field
from actorserve.http.requests.fields import StreamOptions
from actorserve.model_files.tokenizer import Tokenizer


class CompletionFormat(ChunkFormat):
    """The ``AnswerFormat`` of completions. Chunks and whole answers have one type, and a stream begins with text.

    Where the client wants the ids of tokens, the first chunk of a choice has those of its prompt.
    """

    def __init__(
        self, head: AnswerHead, usage: Usage, request: CompletionRequest, tokenizer: Tokenizer, work: WorkerRequests
    ) -> None:
        options = request.stream_options or StreamOptions()
        super().__init__(
            head,
            usage,
            options,
            chunk_type="text_completion",
            answer_type="text_completion",
            has_energy=request.return_energy,
        )
        self._request = request
        self._tokenizer = tokenizer
        self._name = token_namer(tokenizer, as_token_ids=request.return_tokens_as_token_ids)
        self._work = work
        self._begun: set[int] = set()  # choices of a stream whose prompt's ids were written

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        fields = self._choice(choice.index, piece.text, piece.tokens, None)
        return self._chunk(fields | self._new_ids(choice.index, piece.tokens))

    def finish(self, choice: Choice) -> bytes:
        assert choice.end is not None
        fields = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.end.reason}
        return self._chunk(fields | self._new_ids(choice.index, ()))

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        shown: list[Json] = []
        for of_prompt in _by_prompt(choices, self._request.num_generated):
            known, num_best = of_prompt[0].prompt_logprobs, self._request.prompt_logprobs
            scores = {"prompt_logprobs": prompt_logprobs_field(known, num_best, self._tokenizer)}
            shown += [
                self._whole(index, choice) | scores for index, choice in enumerate(self._best(of_prompt), len(shown))
            ]
        return self._answer(shown)

    def _new_ids(self, index: int, tokens: Sequence[AnswerToken]) -> Json:
        """The fields of ids in a chunk of the choice with this index."""
        if not self._request.return_token_ids:
            return {}
        ids: Json = {"token_ids": output_ids(tokens)}
        if index not in self._begun:
            self._begun.add(index)
            ids["prompt_token_ids"] = self._prompt(index)
        return ids

    def _prompt(self, index: int) -> Sequence[int]:
        """The token ids of the prompt of the choice with this index."""
        prompt = index // self._request.n
        return self._work.specs[prompt * self._work.choices_per_prompt].prompt_token_ids

    def _best(self, choices: Sequence[WholeChoice]) -> Sequence[WholeChoice]:
        """The ``n`` choices of the highest log-probability per token, the best first, if there are more than ``n``."""
        if len(choices) == self._request.n:
            return choices
        return sorted(choices, key=lambda choice: -choice.mean_logprob)[: self._request.n]

    def _whole(self, index: int, choice: WholeChoice) -> Json:
        fields = self._choice(index, "".join(choice.text), choice.tokens, choice.finish_reason)
        wants_ids = self._request.return_token_ids
        return fields | {
            "token_ids": output_ids(choice.tokens) if wants_ids else None,
            "prompt_token_ids": self._prompt(index) if wants_ids else None,
        }

    def _choice(self, index: int, text: str, tokens: Sequence[AnswerToken], reason: FinishReason | None) -> Json:
        logprobs = self._logprobs(tokens) if self._request.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Json:
        """Columns over the tokens; ``text_offset`` counts characters from the start of the choice's text."""
        return {
            "text_offset": [token.offset for token in tokens],
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [finite(token.logprobs.logprob) if token.logprobs else None for token in tokens],
            "top_logprobs": [self._best_tokens(token) for token in tokens],
        }

    def _best_tokens(self, token: AnswerToken) -> Json | None:
        """The chosen token, then the best ones at its position, by text. If texts are equal, the likeliest counts.

        Clients of vLLM take the first entry for the chosen token.
        """
        known = token.logprobs
        if known is None:
            return None
        best: dict[str, float] = {}
        pairs = [(token.token_id, known.logprob), *zip(known.top_token_ids, known.top_logprobs, strict=True)]
        for token_id, logprob in pairs:
            text = self._name(token_id)
            best[text] = max(finite(logprob), best.get(text, float("-inf")))
        return best


def _by_prompt(choices: Sequence[WholeChoice], choices_per_prompt: int) -> Iterator[Sequence[WholeChoice]]:
    for first in range(0, len(choices), choices_per_prompt):
        yield choices[first : first + choices_per_prompt]
