"""The field ``prompt_logprobs`` of answers, in vLLM's form."""

from actorserve.core.messages import PromptLogprobs
from actorserve.http.answers.answer_format import Json
from actorserve.http.openai.chunks import finite
from actorserve.model_files.tokenizer import Tokenizer


def prompt_logprobs_field(
    known: PromptLogprobs | None, num_best: int | None, tokenizer: Tokenizer
) -> list[Json | None] | None:
    """For each token of the prompt an object by token id: of the token itself, then of the ``num_best`` best tokens.

    None for the first token, because nothing precedes it. None in place of the list if the client wants none.
    """
    if known is None or num_best is None:
        return None
    field: list[Json | None] = [None]
    width = 1 + known.num_best
    for first in range(0, len(known.token_ids), width):
        entries: Json = {}
        for at in range(first, first + 1 + min(num_best, known.num_best)):
            token_id = known.token_ids[at]
            entries[str(token_id)] = {
                "logprob": finite(known.logprobs[at]),
                "rank": known.ranks[at],
                "decoded_token": tokenizer.token_text(token_id),
            }
        field.append(entries)
    return field
