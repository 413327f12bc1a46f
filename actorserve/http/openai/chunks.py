"""What the answers of OpenAI's two generating endpoints share: chunks, usage, errors, and the end of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from actorserve.http.answers import sse
from actorserve.http.answers.answer_format import Json
from actorserve.http.answers.usage import Usage
from actorserve.http.errors import RequestFailedError
from actorserve.http.requests.fields import StreamOptions

LOWEST_LOGPROB = -9999.0
"""Written in place of minus infinity, which JSON cannot express."""
_KIND_DIGITS = 12  # of a kind, which is a hash, because every chunk repeats it


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats. ``created_s`` is Unix time in whole seconds."""

    answer_id: str
    created_s: int
    model: str

    def fields(self, answer_type: str) -> Json:
        """The head as the first fields of a JSON object of this type."""
        return {"id": self.answer_id, "object": answer_type, "created": self.created_s, "model": self.model}


class ChunkFormat:
    """The part of an ``AnswerFormat`` that both endpoints share. Their own classes write the choices."""

    def __init__(
        self,
        head: AnswerHead,
        usage: Usage,
        options: StreamOptions,
        *,
        chunk_type: str,
        answer_type: str,
        has_energy: bool,
    ) -> None:
        """``chunk_type`` and ``answer_type`` are the ``object`` fields of chunks and of whole answers. ``has_energy``:
        the usage tells the answer's energy.
        """
        self._head = head
        self._usage = usage
        self._options = options
        self._answer_type = answer_type
        self._has_energy = has_energy
        self._chunk_fields = head.fields(chunk_type)
        self._chunk_events = sse.ChunkEvents(self._chunk_fields)
        self._num_told_kinds = 0

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def end(self) -> bytes:
        if self._options.include_usage:
            return self._events.event_with_usage(self._usage_fields()) + sse.DONE
        return sse.DONE

    def fail(self, failure: RequestFailedError) -> bytes:
        return sse.event(failure.body()) + sse.DONE

    def refusal(self, failure: RequestFailedError) -> Response:
        return failure.response()

    @property
    def _events(self) -> sse.ChunkEvents:
        """Chunks' heads with the fingerprint so far, which changes when a worker of another kind goes on."""
        kinds = self._usage.kinds
        if len(kinds) != self._num_told_kinds:
            self._num_told_kinds = len(kinds)
            self._chunk_fields |= fingerprint_field(kinds)
            self._chunk_events = sse.ChunkEvents(self._chunk_fields)
        return self._chunk_events

    def _chunk(self, choice: Json, num_untold: int = 0, further: Json | None = None) -> bytes:
        """A chunk with one choice, and with ``further`` fields beside it. ``num_untold`` of the tokens made so far
        belong to the next chunk.
        """
        events = self._events
        if further is not None:
            events = sse.ChunkEvents(self._chunk_fields | further)
        if not self._options.include_usage:
            return events.event(choice)
        usage = self._usage_fields(num_untold) if self._options.continuous_usage_stats else None
        return events.event_with_usage(usage, choice)

    def _answer(self, choices: Sequence[Json]) -> Json:
        """The whole answer."""
        head = self._head.fields(self._answer_type) | fingerprint_field(self._usage.kinds)
        return head | {"choices": choices, "usage": self._usage_fields()}

    def _usage_fields(self, num_untold: int = 0) -> Json:
        """The numbers of tokens so far: of the prompts, of those found in a prefix cache, and of the generated ones,
        of which ``num_untold`` are left out. With the energy, if the client wants that."""
        num_output_tokens = self._usage.num_output_tokens - num_untold
        fields: Json = {
            "prompt_tokens": self._usage.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._usage.num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._usage.num_cached_tokens},
        }
        if self._has_energy:
            energy = self._usage.energy
            known = None if energy is None else {"prompt": energy.prompt_j, "token": energy.token_j}
            fields["energy_joules"] = known
        return fields


def fingerprint_field(kinds: Sequence[str]) -> Json:
    """The field that tells what an answer's tokens depend on beside the request: the kinds of the workers that made
    them. Several kinds (prompt and token pools of different hardware, or a worker that died) are joined by ``+``, in
    order: then the same request may get another answer. Without a known kind there is no field.
    """
    return {"system_fingerprint": "fp_" + "+".join([kind[:_KIND_DIGITS] for kind in kinds])} if kinds else {}


def finite(logprob: float) -> float:
    """The number as JSON can express it. NaN becomes the lowest log-probability, because NaN > x is false."""
    return max(LOWEST_LOGPROB, logprob)
