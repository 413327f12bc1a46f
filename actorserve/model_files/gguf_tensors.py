"""Where a GGUF file holds a decoder's tensors, by llama.cpp's names."""

import re
from collections.abc import Collection

from gguf.constants import GGMLQuantizationType

from actorserve.model_files.description import DecoderConfig, TensorSpec
from actorserve.model_files.packing import Shape
from actorserve.model_files.tensors import decoder_tensors, gate_up_rows, part_of, part_rotary_rows, qkv_rows

TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
"""The supported number formats of the decoder's tensors."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_IN_GEMMA3_LAYER = _IN_LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_HARMLESS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")


def is_harmless(name: str) -> bool:
    """Whether the file may have this tensor in addition to the decoder's: RoPE's factors are in the config already."""
    return _HARMLESS.fullmatch(name) is not None


def stored_tensors(config: DecoderConfig, architecture: str, stored: Collection[str]) -> tuple[TensorSpec, ...]:
    """All of the decoder's tensors, and where a file of this ``architecture`` with the tensors ``stored`` has them.

    In files of architecture ``llama``, RoPE rotates the pairs (2i, 2i + 1) of a head. We rotate (i, i + head_dim / 2).
    """
    head_rows = part_rotary_rows(config)
    if architecture == "llama":
        head_rows = (*range(0, config.head_dim, 2), *range(1, config.head_dim, 2))
    specs = [_place(config, name, shape) for name, shape in decoder_tensors(config).items()]
    if "blk.0.attn_qkv.weight" in stored:
        specs = [part_of(spec, "attn_qkv", qkv_rows(config)) for spec in specs]
    if architecture == "phi3":
        specs = [part_of(spec, "ffn_up", gate_up_rows(config)) for spec in specs]
    return tuple(spec._replace(head_rows=head_rows) if spec.is_rotated else spec for spec in specs)


def _place(config: DecoderConfig, name: str, shape: Shape) -> TensorSpec:
    if name in _WHOLE:
        return TensorSpec(name, shape, _WHOLE[name], shape)
    expert = _EXPERT.fullmatch(name)
    if expert:
        stored_name = f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight"
        return TensorSpec(name, shape, stored_name, (config.num_experts, *shape), expert=int(expert[2]))
    names = _IN_GEMMA3_LAYER if config.architecture == "gemma3" else _IN_LAYER
    _, _, layer, *within, kind = name.split(".")
    return TensorSpec(name, shape, f"blk.{layer}.{names['.'.join(within)]}.{kind}", shape)
