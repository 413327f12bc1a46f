"""Choosing tokens on a GPU: the rules of ``workers.sampling.token_choice`` as four Triton kernels without a sort.

Weights are the integers of ``token_choice.weigh``, so sums are exact in any order, and atomic additions do not change a
token. Thresholds are found bit by bit: a pass over the candidates sums the weights above three numbers at once. Peaked
logits leave few candidates. Flat logits, or a top_k of more than a thousandth of the vocabulary, leave many, which is
slower and gives the same tokens.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from workers.sampling.token_choice import RULE_FIELDS

_CHUNK_TOKENS = 2048  # of one program
_LEAST_GROUP_TOKENS = 128
_MAX_GROUPS = 1024  # the maxima that one program holds in registers
_BLOCK = 2048  # candidates at a time
_NUM_WARPS = {"find_maxima": 4, "weigh": 8, "gather_candidates": 8, "pick": 8}


def choose_on_gpu(logits: Tensor, rules: Tensor, masks: Tensor, allowed: Tensor) -> Tensor:
    """The token of each row of ``logits`` [B, vocab] float32, by its rule: [B] int64 on the device.

    ``rules``: [B, 5] float64, the fields of ``token_choice.Rule``. ``masks``: [B] int64, each row's row in ``allowed``
    [M, ceil(vocab / 8)] uint8 (``grammars.Masks``), or -1. All tensors are on one device. It edits nothing, launches
    kernels alone, and does not wait for the device.

    A row gets the token of ``token_choice.choose``. A row with NaN, or without a finite maximum, gets what a greedy
    choice among its allowed tokens gives.

    Raises: ValueError if types or shapes do not fit together; ImportError without the package ``triton``.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not 0 < vocab_size <= 2**20:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}: float32 rows of up to 2**20 tokens are wanted")
    if tuple(rules.shape) != (num_rows, RULE_FIELDS) or rules.dtype != torch.float64 or not rules.is_contiguous():
        raise ValueError(f"rules {tuple(rules.shape)} {rules.dtype}: [{num_rows}, {RULE_FIELDS}] float64 is wanted")
    if tuple(masks.shape) != (num_rows,) or masks.dtype != torch.int64 or not masks.is_contiguous():
        raise ValueError(f"masks {tuple(masks.shape)} {masks.dtype}: [{num_rows}] int64 is wanted")
    if allowed.dtype != torch.uint8 or allowed.dim() != 2 or allowed.shape[1] != -(-vocab_size // 8):
        raise ValueError(f"allowed {tuple(allowed.shape)} {allowed.dtype}: [masks, {-(-vocab_size // 8)}] uint8")
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return chosen
    kernels: Any = importlib.import_module("workers.sampling.triton_choice_kernel")
    sizes = _sizes_for(vocab_size)
    num_groups, num_chunks = -(-vocab_size // sizes["group_tokens"]), -(-vocab_size // sizes["chunk_tokens"])

    def scratch(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((num_rows, width), dtype=dtype, device=logits.device)

    values = {
        "logits": logits,
        "rules": rules,
        "masks": masks,
        "allowed": allowed,
        "maxima": scratch(num_groups, torch.int64),
        "weights": scratch(vocab_size, torch.int64),
        "chunk_sums": scratch(num_chunks, torch.int64),
        "candidates": scratch(vocab_size, torch.int32),
        "num_candidates": scratch(1, torch.int32),
        "chosen": chosen,
        "logits_stride": logits.stride(0),
        "allowed_stride": allowed.stride(0),
        "vocab_size": vocab_size,
        "num_groups": num_groups,
        "num_chunks": num_chunks,
        **sizes,
    }
    for name, num_warps in _NUM_WARPS.items():
        kernel = getattr(kernels, name)
        grid = (num_rows,) if name == "pick" else (num_rows, num_chunks)
        kernel[grid](**{argument: values[argument] for argument in kernel.arg_names}, num_warps=num_warps)
    return chosen


def _sizes_for(vocab_size: int) -> dict[str, int]:
    """The kernels' compile-time sizes, which the vocabulary alone decides."""
    group_tokens = max(_LEAST_GROUP_TOKENS, _next_power_of_two(-(-vocab_size // _MAX_GROUPS)))
    chunk_tokens = max(_CHUNK_TOKENS, group_tokens)
    return {
        "group_tokens": group_tokens,
        "chunk_tokens": chunk_tokens,
        "chunk_groups": chunk_tokens // group_tokens,
        "padded_groups": _next_power_of_two(-(-vocab_size // group_tokens)),
        "padded_chunks": _next_power_of_two(-(-vocab_size // chunk_tokens)),
        "block": _BLOCK,
    }


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
