"""Makes the answers of all endpoints that generate."""

import math
from collections.abc import Callable, Sequence

from actorserve.core.messages import RequestSpec
from actorserve.http.answers.answer import Answer
from actorserve.http.answers.answer_format import AnswerFormat
from actorserve.http.answers.choice import Choice
from actorserve.http.answers.detokenizer import Detokenizer
from actorserve.http.answers.usage import Usage
from actorserve.http.answers.worker_requests import WorkerRequests
from actorserve.http.answers.writers import AnswerWriter, EventWriter, ResponseSender, WholeWriter
from actorserve.http.metrics.metrics import Metrics
from actorserve.http.service import Service
from actorserve.model_files.tokenizer import Tokenizer


class Answers:
    """What all answers share. A stream that was silent for ``keep_alive_s`` gets a sign of life, and no answer takes
    longer than ``max_answer_s``.
    """

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        tokenizer: Tokenizer,
        keep_alive_s: float,
        max_answer_s: float = math.inf,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._keep_alive_s = keep_alive_s
        self._max_answer_s = max_answer_s

    def answer(
        self,
        work: WorkerRequests,
        make_format: Callable[[Usage], AnswerFormat],
        stop: Sequence[str],
        *,
        stream: bool,
        wants_token_ids: bool = False,
    ) -> Answer:
        """The ASGI app that submits ``work`` and answers in the form that ``make_format`` makes for its usage.

        ``stop`` are the strings that end a choice. ``wants_token_ids``: the form tells the ids of the tokens.
        """
        choices: list[Choice] = []
        for index, spec in enumerate(work.specs):
            of_prompt = index % work.choices_per_prompt
            first = choices[-of_prompt] if of_prompt else None
            parser = work.new_parser() if work.may_be_complete else None
            detokenizer, echo = self._detokenizer(spec, work), work.echo(index)
            choices.append(Choice(spec, detokenizer, stop, index, echo, first, parser, wants_token_ids=wants_token_ids))
        answer_format = make_format(Usage(choices, work.num_prompt_tokens, work.choices_per_prompt))

        def make_writer(sender: ResponseSender) -> AnswerWriter:
            if stream:
                return EventWriter(sender, answer_format)
            return WholeWriter(sender, answer_format, len(choices))

        return Answer(
            self._service, self._metrics, work.specs, choices, make_writer, self._keep_alive_s, self._max_answer_s
        )

    def _detokenizer(self, spec: RequestSpec, work: WorkerRequests) -> Detokenizer:
        return Detokenizer(self._tokenizer, spec.prompt_token_ids, kept_token_ids=work.marker_ids)
