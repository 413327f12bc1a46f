"""What a model is, read from its files: the decoder's shape, where its weights lie, and how it ends and chats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Architecture = Literal["llama", "qwen3", "qwen3_moe", "mixtral", "gemma3", "opt"]
"""Canonical names of the decoders that the engine can compute. ``llama`` is also Mistral, SmolLM2, Qwen2, and Phi-3."""

Activation = Literal["silu", "gelu_tanh", "relu"]

LoadFormat = Literal["auto", "dummy"]
"""``auto`` reads the model's weights; ``dummy`` makes random ones for the shape that a folder's config.json tells."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer's shape, however its file spells it. Counts are positive and consistent.

    ``num_heads`` is a multiple of ``num_kv_heads``; ``head_dim`` and ``rotary_dim`` are even. The fields from
    ``attention_out_bias`` on have the values of a plain Llama where they are not given.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the MLP; unused where there are experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    """Added to the mean square (RMSNorm) or the variance (LayerNorm, in OPT)."""
    rope_theta: float
    """Base of the rotary angles; of the layers with full attention where ``local_rope_theta`` is given."""
    rotary_dim: int
    """How many dimensions of a head turn. Rows of the query and key weights are brought into such an order that these
    are the first ``rotary_dim / 2`` of each half of a head. 0 in OPT, whose positions are learned."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    """Per layer: how many tokens, itself included, a token attends to; 0 for all before it."""
    query_scale: float
    """What attention scores are multiplied with: ``head_dim ** -0.5``, or the file's own."""
    rope_scaling: dict[str, object] | None = None
    """None for plain RoPE, else Hugging Face's names: ``rope_type`` (``linear``, ``dynamic``, ``yarn``, ``llama3``,
    ``longrope``) and that type's own parameters, such as ``factor`` and ``original_max_position_embeddings``; not to be
    changed. GGUF files write llama3's scaling out: ``rope_type`` is then ``factors``, and ``factors`` holds
    ``rotary_dim / 2`` numbers by which the inverse frequencies are divided. ``longrope`` has ``short_factor`` and
    ``long_factor``, each such numbers. It does not hold for layers that turn by ``local_rope_theta``."""
    local_rope_theta: float | None = None
    """Base of the rotary angles of the layers with a window, where it is another (Gemma 3)."""
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of query and keys is normalized before it turns, with gains of [head_dim]."""
    num_experts: int = 0
    """0 where each layer has one MLP."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalize_expert_weights: bool = False
    """Whether the chosen experts' softmax weights are divided by their sum."""
    embedding_scale: float = 1.0
    """What token embeddings are multiplied with on their way in."""


class TensorSpec(NamedTuple):
    """One weight: its name and shape in the model, and which part of which stored tensor it is.

    Names are those that transformers' class for the architecture has, before any fusing: ``q_proj``, ``gate_proj`` and
    each expert are tensors of their own. Linear weights are ``[out_features, in_features]``. The tensor is
    ``stored[expert, first_row : first_row + shape[0]]``, where ``expert`` is None for tensors that are not stacked.
    """

    name: str
    shape: tuple[int, ...]
    stored_name: str
    stored_shape: tuple[int, ...]
    first_row: int = 0
    expert: int | None = None
    head_rows: tuple[int, ...] = ()
    """Where not empty: row i of each head is the stored head's row ``head_rows[i]``. [head_dim]"""
    addend: float = 0.0
    """Added to each stored number, in float32 (Gemma's gains are stored as their distance from one)."""

    @property
    def turns(self) -> bool:
        """Whether it makes queries or keys, whose heads RoPE turns."""
        return ".q_proj." in self.name or ".k_proj." in self.name


@dataclass(frozen=True)
class ModelDescription:
    """A model that can be served, as its files describe it.

    ``path`` is the GGUF file or the folder; ``weight_files`` are the files with tensors, in order, and ``tensors`` all
    weights of the decoder. A ``dummy`` has the folder's shape, no weight files, and random weights. ``special_tokens``
    maps ``bos_token``, ``eos_token`` and the like to their text, as chat templates want them. ``tokenizer_metadata``
    holds a GGUF file's ``tokenizer.ggml.*`` values (empty for a folder, where tokenizer.json lies beside the weights).
    """

    name: str
    path: Path
    format: Literal["gguf", "hf", "dummy"]
    config: DecoderConfig
    weight_files: tuple[Path, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
    tokenizer_metadata: Mapping[str, object] = field(default_factory=dict, repr=False)
    tensors: tuple[TensorSpec, ...] = field(default=(), repr=False)
