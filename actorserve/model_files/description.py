"""What a model is, read from its files: the decoder's shape, where its weights lie, and how it ends and chats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SUPPORTED_ARCHITECTURES = ("llama",)
"""Canonical names of the decoders that the engine can compute."""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer's shape, however its file spells it. Counts are positive and consistent.

    ``num_heads`` is a multiple of ``num_kv_heads``; ``head_dim`` is even. ``rope_scaling`` is None for plain RoPE, else
    Hugging Face's names: ``rope_type`` (``linear``, ``dynamic``, ``yarn``, ``llama3``) and that type's own parameters,
    such as ``factor`` and ``original_max_position_embeddings``; it is not to be changed. GGUF files write llama3's
    scaling out: ``rope_type`` is then ``factors``, and ``factors`` holds ``head_dim / 2`` numbers by which the inverse
    frequencies are divided.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, object] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


@dataclass(frozen=True)
class ModelDescription:
    """A model that can be served, as its files describe it.

    ``path`` is the GGUF file or the folder; ``weight_files`` are the files with tensors, in order. ``special_tokens``
    maps ``bos_token``, ``eos_token`` and the like to their text, as chat templates want them. ``tokenizer_metadata``
    holds a GGUF file's ``tokenizer.ggml.*`` values (empty for a folder, where tokenizer.json lies beside the weights).
    """

    name: str
    path: Path
    format: Literal["gguf", "hf"]
    config: DecoderConfig
    weight_files: tuple[Path, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    tokenizer_metadata: Mapping[str, object] = field(default_factory=dict, repr=False)
