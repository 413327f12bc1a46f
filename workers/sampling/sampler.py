"""The sampler: from a batch's logits to each request's next token.

A request's token depends only on its own logits, parameters, earlier tokens and output position. It does not depend on
the rest of the batch, the worker or the time (``actorserve.core.rng``, ``workers.sampling.token_choice``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorserve.core.messages import RequestSpec, SamplingParams, TokenLogprobs
from actorserve.core.rng import uniform
from workers.sampling.grammars import Masks
from workers.sampling.logit_edits import LogitEdits, apply_edits
from workers.sampling.logprobs import read_logprobs
from workers.sampling.token_choice import Rule, choose, choose_natively


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row, and log-probabilities if the request wants them. Columns are as long as the batch."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class _State:
    sampling: SamplingParams
    edits: LogitEdits


class Sampler:
    """Samples for the requests that were added. It keeps their earlier tokens on the host if penalties need them."""

    def __init__(self, vocab_size: int, device: torch.device | str, is_native: bool = False) -> None:
        """``is_native``: choose tokens by our own kernel for CPUs, which must be loaded.

        Raises: ValueError if the vocabulary is empty, or so large that integer weights could overflow (2**20).
        """
        if not 0 < vocab_size <= 2**20:
            raise ValueError(f"a vocabulary of {vocab_size} tokens cannot be sampled: 1 to {2**20} can")
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._choose = choose_natively if is_native else choose
        self._states: dict[str, _State] = {}

    def add(self, request: RequestSpec) -> None:
        """Add a request, new or with earlier output; it replaces a request with the same id."""
        self._states[request.request_id] = _State(request.sampling, LogitEdits(request, self._vocab_size))

    def drop(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._states.pop(request_id, None)

    def __call__(
        self, logits: Tensor, request_ids: Sequence[str], positions: Sequence[int], masks: Masks | None = None
    ) -> Sampled:
        """Choose each row's token, and count it for the penalties. Blocks until the tokens are on the host.

        ``logits``: [B, vocab_size] float32 on the sampler's device, one row for each request; edited in place.
        ``positions``: output positions (0 is the first generated token). A position may be sampled again, and gives
        the same token for the same logits; tokens after it are forgotten. ``masks``: of the rows that have a grammar;
        log-probabilities do not depend on them.

        Raises: KeyError if a request was not added; ValueError for wrong shapes, or if a request has penalties and its
        tokens before the position are unknown.
        """
        if tuple(logits.shape) != (len(request_ids), self._vocab_size) or len(positions) != len(request_ids):
            raise ValueError(
                f"logits are {tuple(logits.shape)}, with {len(request_ids)} ids and {len(positions)} positions; "
                f"[batch, {self._vocab_size}] is wanted"
            )
        if logits.dtype != torch.float32 or logits.device.type != self._device.type:
            raise ValueError(f"logits are {logits.dtype} on {logits.device}; float32 on {self._device} is wanted")
        if not request_ids:
            return Sampled((), ())
        logits = logits.contiguous()
        num_best = self.num_best(request_ids)
        raw = logits.index_select(0, torch.tensor(list(num_best), device=logits.device)) if num_best else None
        self.edit(logits, request_ids, positions)
        token_ids = self._choose(logits, self.rules(request_ids, positions), masks)
        self.append(request_ids, token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if raw is not None:
            found = read_logprobs(raw, [token_ids[row] for row in num_best], list(num_best.values()))
            for row, entry in zip(num_best, found, strict=True):
                logprobs[row] = entry
        return Sampled(tuple(token_ids), tuple(logprobs))

    def rules(self, request_ids: Sequence[str], positions: Sequence[int]) -> list[Rule]:
        """How to choose each request's token at its output position. Raises: KeyError if a request was not added."""
        return [_rule(state.sampling, at) for state, at in zip(self._of(request_ids), positions, strict=True)]

    def edit(self, logits: Tensor, request_ids: Sequence[str], positions: Sequence[int]) -> None:
        """Change contiguous logits in place by what their requests want, beside grammars. Raises: as a call."""
        edits = [state.edits for state in self._of(request_ids)]
        rows = [row for row, edit in enumerate(edits) if edit.touches(positions[row])]
        if rows:
            apply_edits(logits, rows, [edits[row] for row in rows], [positions[row] for row in rows])

    def needs_tokens(self, request_ids: Sequence[str]) -> bool:
        """Whether penalties of one of these requests depend on its newest token."""
        return any(state.edits.penalties is not None for state in self._of(request_ids))

    def append(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """These requests got these tokens. Unknown ids are ignored."""
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            state = self._states.get(request_id)
            if state is not None and state.edits.penalties is not None:
                state.edits.penalties.append(token_id)

    def num_best(self, request_ids: Sequence[str]) -> dict[int, int]:
        """The rows whose log-probabilities are wanted, and of how many of the best tokens besides the chosen one."""
        wanted = (state.sampling.top_logprobs for state in self._of(request_ids))
        return {row: count for row, count in enumerate(wanted) if count >= 0}

    def _of(self, request_ids: Sequence[str]) -> list[_State]:
        return [self._states[request_id] for request_id in request_ids]


def _rule(sampling: SamplingParams, position: int) -> Rule:
    number = uniform(sampling.seed, position)
    return Rule(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, number)
