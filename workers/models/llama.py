"""The Llama family's decoder (Touvron et al., 2023): RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from actorserve.model_files.description import DecoderConfig
from workers.attention import Attention
from workers.batch import Batch
from workers.kv_cache import KVCache
from workers.linear import Linear
from workers.models.rope import RotaryTable, rotate
from workers.tiles import RowTiles

_SERIAL_ELEMENTS = 32768  # torch computes fewer on one thread


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    attention_out: Linear  # num_heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


class Llama:
    """The decoder. R rows are any tokens: every method but ``forward`` treats each row alone."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: Sequence[LlamaLayer],
        final_norm: Tensor,
        output: Linear,
        rotary: RotaryTable,
    ) -> None:
        self.config = config
        self.layers = tuple(layers)
        self._embedding = embedding
        self._final_norm = final_norm
        self._output = output
        self._rotary = rotary

    def forward(self, batch: Batch, cache: KVCache, attention: Attention, tiles: RowTiles) -> Tensor:
        """Hidden states of the batch's tokens, [T, hidden]; their keys and values are left in the cache."""
        x = self._embedding.index_select(0, batch.token_ids)
        cos, sin = self._rotary(batch.positions)
        for number, layer in enumerate(self.layers):
            query, keys, values = tiles.run(partial(self.before_attention, layer), x, cos, sin)
            cache.write(number, batch, keys, values)
            attended = attention(query, *cache.layers[number], batch)
            (x,) = tiles.run(partial(self.after_attention, layer), x, attended)
        return x

    def before_attention(self, layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """[R, hidden] -> query [R, num_heads, head_dim], keys and values [R, num_kv_heads, head_dim]."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, self.config.head_dim)
        rotated = rotate(qkv[:, : num_heads + num_kv_heads], cos, sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_heads + num_kv_heads :]

    def after_attention(self, layer: LlamaLayer, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        """[R, hidden] and [R, num_heads, head_dim] -> [R, hidden]."""
        x = x + layer.attention_out(attended.flatten(1))
        return (x + layer.down(swiglu(layer.gate_up(self._norm(x, layer.mlp_norm)))),)

    def logits(self, x: Tensor) -> tuple[Tensor]:
        """[R, hidden] -> [R, vocab_size] float32."""
        return (self._output(self._norm(x, self._final_norm)).float(),)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[R, 2 * intermediate] -> [R, intermediate]: silu(gate) * up. May overwrite its input.

    torch's vector loop rounds the last few elements of a thread's share in another way than the others. So a share is
    made of whole rows here, and each of them has the same tail.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    num_rows, width = gate.shape
    if gate.device.type != "cpu" or torch.get_num_threads() == 1 or num_rows == 1:
        return F.silu(gate) * up
    step = max(1, _SERIAL_ELEMENTS // width)
    for start in range(0, num_rows, step):
        F.silu(gate[start : start + step], inplace=True)
    return gate * up
