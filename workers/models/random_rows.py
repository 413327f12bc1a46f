"""Random inputs for a decoder's token-wise functions, for probing tile sizes."""

from collections.abc import Callable

import torch
from torch import Tensor

from actorserve.model_files.description import DecoderConfig
from workers.kernels.tiles import RowFunction

RowProbe = tuple[RowFunction, Callable[[int], tuple[Tensor, ...]]]
"""A token-wise function, and a function that makes its inputs for a number of rows."""


class RandomRows:
    """Each method makes inputs of ``num_rows`` rows."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def hidden(self, num_rows: int) -> tuple[Tensor, ...]:
        """Hidden states, [num_rows, hidden]."""
        return (self._normal(num_rows, self._config.hidden_size),)

    def before_attention(self, num_rows: int) -> tuple[Tensor, ...]:
        """Hidden states and, with RoPE, cosines and sines, [num_rows, 1, head_dim / 2] float32."""
        if not self._config.rotary_dim:
            return self.hidden(num_rows)
        angles = torch.rand((num_rows, 1, self._config.head_dim // 2), generator=self._generator) * 6.3
        return (*self.hidden(num_rows), angles.cos().to(self._device), angles.sin().to(self._device))

    def after_attention(self, num_rows: int) -> tuple[Tensor, ...]:
        """Hidden states and attention's results, [num_rows, num_heads, head_dim]."""
        return *self.hidden(num_rows), self._normal(num_rows, self._config.num_heads, self._config.head_dim)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)
