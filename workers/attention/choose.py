"""Which attention backend a model gets on a device."""

import importlib.util

import torch

from actorserve.model_files.description import DecoderConfig
from workers.attention import native as native_backend, triton_paged
from workers.attention.base import Attention
from workers.attention.native import NativePagedAttention
from workers.attention.tiled import TiledAttention
from workers.attention.triton_paged import TritonPagedAttention


def choose_attention(config: DecoderConfig, device: torch.device, dtype: torch.dtype, native: bool) -> Attention:
    """``dtype``: of queries and KV. ``native``: whether the native kernels are loaded and used on this CPU.

    Raises: SettingsError if Triton is there, but cannot build its kernel; ValueError if only torch's own products are
    available, and they depend on a row's place in a tile.
    """
    if device.type == "cuda":
        fits = config.head_dim % 16 == 0 and config.head_dim <= triton_paged.MAX_HEAD_DIM
        if fits and importlib.util.find_spec("triton") is not None:
            attention = TritonPagedAttention(config.query_scale)
            attention.try_out(config, dtype, device)
            return attention
    elif native and config.head_dim % 2 == 0 and config.head_dim <= native_backend.MAX_HEAD_DIM:
        return NativePagedAttention(config.query_scale)
    return TiledAttention(config.num_heads, config.num_kv_heads, config.head_dim, device, config.query_scale)
