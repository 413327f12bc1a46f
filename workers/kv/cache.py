"""The KV pool: one tensor of slots for all requests. The core decides which request owns which block."""

import math

import torch
from torch import Tensor

from actorserve.errors import SettingsError
from actorserve.model_files.description import DecoderConfig
from workers.batch import Batch
from workers.kv.layer_split import LayerSplit, one_group
from workers.kv.shared_memory import SharedMemory


class KVCache:
    """``pool``: [layers_per_group, 2, num_kv_heads, num_slots, head_dim]; slot = block * tokens_per_block + offset.

    A block holds tokens of one group's layers (``split``). Most models have one group with all layers.

    With ``keys_transposed`` a block's keys lie transposed (see `transposed`) in the same bytes. Then the last two
    dimensions of ``pool`` are wrong for keys; read ``layers`` instead.

    On a CPU the pool lies in ``memory``, which other workers on this host can map; a page becomes resident when it is
    first written.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        keys_transposed: bool = False,
        split: LayerSplit | None = None,
    ) -> None:
        """``split``: the layers' groups; None for one group.

        ``keys_transposed``: the attention backend's choice; it requires the native kernels, which then store KV.

        Raises: SettingsError if the memory cannot be allocated.
        """
        self.keys_transposed = keys_transposed
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        split = split or one_group(config.num_layers)
        self.groups = split.groups
        self.group_of = split.group_of
        shape = (split.layers_per_group, 2, config.num_kv_heads, num_blocks * tokens_per_block, config.head_dim)
        self.memory: SharedMemory | None = None
        if device.type == "cpu":
            try:
                self.memory = SharedMemory(math.prod(shape) * dtype.itemsize)
            except (OSError, OverflowError) as error:
                raise SettingsError(f"no memory for workers.kv_cache_bytes: {error}") from None
            self.pool = torch.frombuffer(self.memory.buffer, dtype=dtype).view(shape)
        else:
            self.pool = torch.empty(shape, dtype=dtype, device=device)
        layers = [
            (transposed(layer[0], tokens_per_block) if keys_transposed else layer[0], layer[1]) for layer in self.pool
        ]
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(layers[place] for place in split.places)
        """Each layer's keys and values, [num_kv_heads, num_slots, head_dim], or keys as `transposed` gives them."""

    @property
    def blocks(self) -> Tensor:
        """The pool's bytes by block, [num_blocks, pieces, bytes of a piece]. A block consists of one piece for each
        layer, keys or values, and head. Copies of whole blocks work for both layouts of keys.
        """
        layers, both, kv_heads, _, head_dim = self.pool.shape
        pieces = self.pool.view(layers * both * kv_heads, self.num_blocks, self.tokens_per_block * head_dim)
        return pieces.view(torch.uint8).transpose(0, 1)

    def begin(self, batch: Batch) -> None:
        """Clear the blocks that get their first token now, for attention that reads whole blocks.

        Such attention reads slots beyond a request's tokens with weight 0. A former owner's infinity or NaN there would
        give NaN.
        """
        fresh = batch.fresh_blocks
        if fresh:
            layers, both, kv_heads, _, head_dim = self.pool.shape
            blocks = self.pool.view(layers, both, kv_heads, self.num_blocks, self.tokens_per_block, head_dim)
            blocks.index_fill_(3, torch.tensor(fresh, device=self.pool.device), 0.0)

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store this step's keys and values, [T, num_kv_heads, head_dim], rounded to the pool's dtype. ``batch`` is
        that of the layer's group.
        """
        if self.keys_transposed:
            torch.ops.actorserve.store_kv(*self.layers[layer], batch.slots, keys, values)
            return
        for pool, new in zip(self.layers[layer], (keys, values), strict=True):
            pool.index_copy_(1, batch.slots, new.transpose(0, 1).to(pool.dtype))


def transposed(keys: Tensor, tokens_per_block: int) -> Tensor:
    """One layer's keys, [num_kv_heads, num_slots, head_dim], viewed in the layout of the native kernels:
    [num_kv_heads, num_blocks, head_dim / n, tokens_per_block, n], where n numbers make 32 bits.

    A vector load then reads one dimension (two of bfloat16) of as many keys as the register has 32-bit lanes.
    """
    num_kv_heads, num_slots, head_dim = keys.shape
    per_word = 4 // keys.itemsize
    return keys.view(num_kv_heads, num_slots // tokens_per_block, head_dim // per_word, tokens_per_block, per_word)


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype, num_layers: int | None = None) -> int:
    """KV bytes of one token over ``num_layers`` layers; None for all."""
    layers = config.num_layers if num_layers is None else num_layers
    return layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
