"""Row operations on CUDA by Triton kernels of our own, each one launch."""

import importlib
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from workers.kernels.row_ops import Activation, HeadGains, PlaceHeads, TorchRowOps

_ALIGNMENT_BYTES = 16
_GATED_COLUMNS = 1024
_TILE_HEADS = 8


class TritonRowOps(TorchRowOps):
    """A row's bits are the same in any batch (``workers.kernels.triton.row_ops_kernel``). ``rotate`` is torch's; models
    use ``place_heads`` instead."""

    def __init__(self) -> None:
        """Raises: ImportError if Triton cannot be imported."""
        self._kernels: Any = importlib.import_module("workers.kernels.triton.row_ops_kernel")
        self.name = f"triton {version('triton')}"

    @property
    def place_heads(self) -> PlaceHeads | None:
        return self._place_heads

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        rows, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        if residual is not None:
            _check(residual.shape == x.shape and residual.is_contiguous(), f"a residual of {residual.shape}")
        width = rows.shape[1]
        self._kernels.rms_norm[(len(rows),)](
            rows,
            weight,
            rows if residual is None else residual,
            out,
            eps,
            rows.stride(0),
            width=width,
            padded=_next_power_of_two(width),
            adds=residual is not None,
            num_warps=_num_warps(width),
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        width = rows.shape[1]
        self._kernels.layer_norm[(len(rows),)](
            rows,
            weight,
            bias,
            out,
            eps,
            rows.stride(0),
            width=width,
            padded=_next_power_of_two(width),
            num_warps=_num_warps(width),
        )
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows = _rows(gate_up)
        width = rows.shape[1] // 2
        out = torch.empty((len(rows), width), dtype=rows.dtype, device=rows.device)
        self._kernels.gated[(len(rows), -(-width // _GATED_COLUMNS))](
            rows,
            out,
            rows.stride(0),
            width=width,
            tile_columns=_GATED_COLUMNS,
            is_silu=activation == "silu",
            num_warps=4,
        )
        return out

    def softmax(self, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, -2), torch.empty_like(x, memory_format=torch.contiguous_format)
        _check(rows.stride(1) == 1, f"rows of {x.shape} with strides {x.stride()}")
        width = rows.shape[1]
        self._kernels.softmax[(len(rows),)](
            rows,
            out,
            rows.stride(0),
            width=width,
            padded=_next_power_of_two(width),
            num_warps=_num_warps(width),
        )
        return out

    def _place_heads(
        self,
        heads: Tensor,
        angles: tuple[Tensor, ...],
        gains: HeadGains | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        num_tokens, num_rows, head_dim = heads.shape
        num_kv_heads = keys.shape[0]
        num_heads = num_rows - 2 * num_kv_heads
        _check(
            keys.shape == values.shape
            and (keys.shape[2], keys.stride(1), values.stride(1)) == (head_dim,) * 3
            and head_dim % 2 == 0
            and num_heads > 0
            and slots.shape == (num_tokens,)
            and all(part.shape == (num_tokens, 1, head_dim // 2) and part.is_contiguous() for part in angles),
            f"heads {heads.shape}, keys {keys.shape}, values {values.shape} and slots {slots.shape}",
        )
        heads = heads.contiguous()
        query = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
        cos, sin = angles or (heads, heads)
        query_gain, key_gain = (heads, heads) if gains is None else (gains.query, gains.key)
        self._kernels.place_heads[(num_tokens, -(-num_rows // _TILE_HEADS))](
            heads,
            query,
            keys,
            values,
            slots,
            cos,
            sin,
            query_gain,
            key_gain,
            0.0 if gains is None else gains.eps,
            keys.stride(0),
            values.stride(0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            padded_half=_next_power_of_two(head_dim // 2),
            tile_heads=_TILE_HEADS,
            norms=gains is not None,
            rotates=bool(angles),
            num_warps=4,
        )
        return query


def _rows(x: Tensor) -> Tensor:
    """``x`` as rows. Triton vectorises the loads of aligned rows, and the order of a sum follows from it. So either
    all rows are aligned, which models' widths are, or the operation is refused.
    """
    _check(x.dim() > 1 and x.stride(-1) == 1, f"rows of {x.shape} with strides {x.stride()}")
    rows = x.flatten(0, -2)
    aligned = rows.stride(0) * rows.itemsize % _ALIGNMENT_BYTES == 0 and rows.data_ptr() % _ALIGNMENT_BYTES == 0
    _check(aligned, f"rows of {x.shape} in {x.dtype}, which are not aligned to {_ALIGNMENT_BYTES} bytes")
    return rows


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"Triton's row operations do not take {what}")


def _num_warps(width: int) -> int:
    """A function of the width alone, because it decides the order of sums."""
    return 4 if width <= 4096 else 8


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
