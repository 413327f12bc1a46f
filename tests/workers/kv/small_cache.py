"""What tests of a small KV cache share."""

import pytest
import torch

from actorserve.model_files.description import DecoderConfig
from workers import native

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=18,
    norm_eps=1e-5,
    rope_theta=1e4,
    rotary_dim=18,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    windows=(0, 0),
    query_scale=1.0,
)
needs_native = pytest.mark.skipif(not native.load(), reason=native.describe())
