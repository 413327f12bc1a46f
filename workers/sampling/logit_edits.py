"""Edits of a request's logits before a token is chosen: logit_bias, min_tokens and penalties.

Edits touch few tokens of few rows. So the touched entries of the whole batch are gathered, changed and written back at
once, and other rows and tokens cost nothing. Every step is one IEEE operation per entry, whatever the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorserve.core.messages import RequestSpec
from workers.sampling.grammars import Masks
from workers.sampling.penalties import PenaltyTable


class LogitEdits:
    """One request's edits. Token ids beyond the vocabulary have no logit and are ignored."""

    def __init__(self, request: RequestSpec, vocab_size: int) -> None:
        sampling = request.sampling
        bias = {token: value for token, value in sampling.logit_bias if 0 <= token < vocab_size}
        self.bias_ids = np.fromiter(bias, np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        stops = sorted({token for token in sampling.stop_token_ids if 0 <= token < vocab_size})
        self._stop_ids = np.array(stops, np.int64)
        # A grammar may allow nothing but a stop token, so its masks see to min_tokens (``sampling.grammar_state``).
        self._min_tokens = 0 if sampling.grammar else sampling.min_tokens
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        self.penalties = PenaltyTable(request, vocab_size) if penalised else None

    def masked_ids(self, position: int) -> NDArray[np.int64]:
        """Tokens that may not be chosen at this output position: stop tokens, until there are ``min_tokens`` tokens."""
        return self._stop_ids[: len(self._stop_ids) if position < self._min_tokens else 0]

    def touches(self, position: int) -> bool:
        """Whether an edit applies at this output position."""
        return self.penalties is not None or len(self.bias_ids) > 0 or len(self.masked_ids(position)) > 0


def apply_edits(logits: Tensor, rows: Sequence[int], edits: Sequence[LogitEdits], positions: Sequence[int]) -> None:
    """Change ``rows`` of ``logits`` [B, vocab] (contiguous float32) in place; ``positions`` are output positions.

    The order is vLLM's: bias, mask, repetition penalty, then frequency and presence penalties.

    Raises: ValueError if a request has penalties and its tokens before the position are unknown.
    """
    flat = logits.view(-1)
    offsets = [row * logits.shape[1] for row in rows]

    bias = [(edit.bias_ids + offset, edit.bias_values) for edit, offset in zip(edits, offsets, strict=True)]
    if any(len(ids) for ids, _ in bias):
        index, values = _joined(bias, logits.device)
        flat.index_copy_(0, index, flat.index_select(0, index) + values)

    masks = [(e.masked_ids(p) + offset,) for e, offset, p in zip(edits, offsets, positions, strict=True)]
    if any(len(ids) for (ids,) in masks):
        (index,) = _joined(masks, logits.device)
        flat.index_fill_(0, index, float("-inf"))

    penalties = []
    for edit, offset, position in zip(edits, offsets, positions, strict=True):
        if edit.penalties is not None:
            edit.penalties.rewind(position)
            ids, factors, amounts = edit.penalties.columns()
            penalties.append((ids + offset, factors, amounts))
    if any(len(column[0]) for column in penalties):
        index, factor, amount = _joined(penalties, logits.device)
        value = flat.index_select(0, index)
        value = torch.where(value > 0, value / factor, value * factor)
        flat.index_copy_(0, index, value - amount)


def apply_masks(logits: Tensor, masks: Masks) -> None:
    """Let only the tokens that the masks allow be chosen: other logits of those rows of ``logits`` [B, vocab] float32
    become minus infinity, in place, and no other row changes.
    """
    allowed = torch.from_numpy(masks.allowed).to(logits.device)
    values, bits = torch.arange(256, device=logits.device), torch.arange(8, device=logits.device)
    penalties_of_byte = torch.where(values.unsqueeze(1).bitwise_right_shift(bits) & 1 > 0, 0.0, float("-inf"))
    penalties = penalties_of_byte.index_select(0, allowed.view(-1).int()).view(len(masks.rows), -1)
    rows = torch.tensor(masks.rows, device=logits.device)
    logits.index_add_(0, rows, penalties[:, : logits.shape[1]])


def _joined(parts: Sequence[tuple[NDArray[Any], ...]], device: torch.device) -> list[Tensor]:
    """Each column of all ``parts``, end to end, on the device."""
    return [torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*parts, strict=True)]
