"""A model's description, read from its files: the decoder's shape, its tensors, its end tokens and chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from actorserve.model_files.packing import FLOATS, Packing, Part

Architecture = Literal["llama", "qwen3", "qwen3_moe", "mixtral", "gemma3", "opt"]
"""Names of the decoders that the engine can compute. ``llama`` includes Mistral, SmolLM2, Qwen2 and Phi-3."""

Activation = Literal["silu", "gelu_tanh", "relu"]

LoadFormat = Literal["auto", "dummy"]
"""``auto`` reads the model's weights. ``dummy`` makes random weights for the shape in a folder's config.json."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer's shape, independent of the file's format. Counts are positive and consistent.

    ``num_heads`` is a multiple of ``num_kv_heads``; ``head_dim`` and ``rotary_dim`` are even. The defaults are the
    values of a plain Llama.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the MLP; unused if there are experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    """Added to the mean square (RMSNorm) or the variance (LayerNorm, in OPT)."""
    rope_theta: float
    """Base of the rotary angles. If ``local_rope_theta`` is given, only layers with full attention use it."""
    rotary_dim: int
    """How many dimensions of a head RoPE rotates. Rows of query and key weights are reordered, so that these dimensions
    are the first ``rotary_dim / 2`` of each half of a head. 0 in OPT, whose positions are learned."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    """Per layer: how many tokens a token attends to, itself included; 0 for all tokens before it."""
    query_scale: float
    """The factor of attention scores: ``head_dim ** -0.5``, or the file's own."""
    rope_scaling: dict[str, object] | None = None
    """None for plain RoPE. Otherwise a read-only mapping with Hugging Face's names: ``rope_type`` (``linear``,
    ``dynamic``, ``yarn``, ``llama3``, ``longrope``) and the parameters of that type, such as ``factor`` and
    ``original_max_position_embeddings``. GGUF files have llama3's scaling as numbers: ``rope_type`` is ``factors``, and
    ``factors`` has ``rotary_dim / 2`` divisors of the inverse frequencies. ``longrope`` has two such tuples,
    ``short_factor`` and ``long_factor``. Layers that use ``local_rope_theta`` are not scaled."""
    local_rope_theta: float | None = None
    """Base of the rotary angles in layers with a window, if it differs (Gemma 3)."""
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of queries and keys is normalized before RoPE, with gains of shape [head_dim]."""
    num_experts: int = 0
    """0 if each layer has one MLP."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalize_expert_weights: bool = False
    """Whether the chosen experts' softmax weights are divided by their sum."""
    embedding_scale: float = 1.0
    """The factor of token embeddings before the first layer."""


class TensorSpec(NamedTuple):
    """One weight: its name and shape in the model, and which part of which stored tensor it is.

    Names are those in transformers' class for the architecture, before any fusing: ``q_proj``, ``gate_proj`` and each
    expert are separate tensors. Linear weights are ``[out_features, in_features]``. The tensor is
    ``stored[expert, first_row : first_row + shape[0]]``; ``expert`` is None for tensors that are not stacked.
    """

    name: str
    shape: tuple[int, ...]
    stored_name: str
    stored_shape: tuple[int, ...]
    first_row: int = 0
    expert: int | None = None
    head_rows: tuple[int, ...] = ()
    """If not empty, row i of each head is row ``head_rows[i]`` of the stored head. [head_dim]"""
    addend: float = 0.0
    """Added to each stored number, in float32 (Gemma's gains are stored minus one)."""
    packing: Packing | None = None
    """If a checkpoint is quantized: the tensors that ``stored_name`` and ``stored_shape`` are packed in."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors that the weight is made of."""
        if self.packing is None:
            return (Part(self.stored_name, self.stored_shape, FLOATS),)
        return tuple(self.packing.parts(self.stored_name, self.stored_shape).values())

    @property
    def is_rotated(self) -> bool:
        """Whether the weight makes queries or keys, whose heads RoPE rotates."""
        return ".q_proj." in self.name or ".k_proj." in self.name


@dataclass(frozen=True)
class ModelDescription:
    """A model that can be served, as its files describe it.

    ``path`` is the GGUF file or the folder, ``weight_files`` are the files with tensors, in order, and ``tensors`` are
    all weights of the decoder. If ``dummy``, there are no weight files, and the weights are random.
    ``special_tokens`` maps ``bos_token``, ``eos_token`` and the like to their text, as chat templates need them.
    ``tokenizer_metadata`` has a GGUF file's ``tokenizer.ggml.*`` values; it is empty for a folder.
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
