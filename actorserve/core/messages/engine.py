"""Messages: between an instance and its engine; none of these leaves the process."""

from actorserve.core.messages.value import value
from actorserve.core.messages.values import PromptLogprobs, TokenLogprobs

NOT_YET = -1
"""Stands for a token that the engine samples in the step before, so that the core does not know it yet."""


@value
class StepPlan:
    """One iteration, as parallel columns over its requests: prefill chunks and decode tokens share it.

    Row r feeds ``token_ids[r]`` at absolute positions ``starts[r]``, ``starts[r] + 1``, ... The KV of position p in the
    layers of group g of G goes to block ``block_tables[r][p // tokens_per_block * G + g]``; most models have one group
    (``core.kv.layer_groups``). The last token of a row may be ``NOT_YET``: the token that the
    step before, which has not ended, samples for this request.
    ``samples[r]`` says whether the chunk reaches the request's last token, so that the next one is sampled.
    ``scores`` is empty, or says of each row whether the log-probabilities of the prompt's tokens that follow the fed
    tokens are wanted.
    """

    step_id: int
    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    block_tables: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    scores: tuple[bool, ...] = ()


@value
class StepDone:
    """Local: the engine finished ``step_id``. Columns hold the sampled rows; ``positions`` are output positions.

    ``prompt_logprobs`` is empty, or has an entry for each row of the plan, in its order: None unless the row's prompt
    was scored. The entry's first token is the one that follows the row's first fed token.
    ``failed`` names the requests of the step that can get no further token, because their grammar met a limit.
    """

    step_id: int
    duration_s: float
    request_ids: tuple[str, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
    failed: tuple[str, ...] = ()


@value
class GrammarReady:
    """Local: the grammar of a request that was added to the engine is compiled, or cannot be compiled. From now on,
    steps that sample for the request do not wait for its grammar.
    """

    request_id: str


@value
class CopyDone:
    """Local: the engine finished the copy ``copy_id``, between device and host or from another worker."""

    copy_id: int
    duration_s: float


@value
class CopyFailed:
    """Local: the copy ``copy_id`` from another worker failed; it writes nothing from now on."""

    copy_id: int


@value
class MemoryLimit:
    """Local: memory now has room for ``num_blocks`` of the pool's blocks, including all that were ever written."""

    num_blocks: int
