"""Where a Hugging Face folder's safetensors hold a decoder's tensors."""

import re
from collections.abc import Collection

from actorserve.model_files.description import DecoderConfig, TensorSpec
from actorserve.model_files.tensors import decoder_tensors, gate_up_rows, part_of, part_rotary_rows, qkv_rows

# Transformers ignores these as well: buffers that older versions saved, a tied head, and a vision tower.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)lm_head\.weight$|^(model\.)?(vision_tower|multi_modal_projector)\."
)
_MIXTRAL = (
    (".mlp.gate.", ".block_sparse_moe.gate."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
_TEXT_PREFIXES = (
    ("language_model.model.", "language_model."),  # the prefixes of the decoder's tensors, and of lm_head
    ("model.language_model.", ""),
)


def is_harmless(name: str) -> bool:
    """Whether the files may have this tensor, although the decoder does not use it."""
    return _HARMLESS.search(name) is not None


def stored_tensors(config: DecoderConfig, model_type: str, stored: Collection[str]) -> tuple[TensorSpec, ...]:
    """All of the decoder's tensors, and where a folder of ``model_type`` with the tensors ``stored`` has them."""
    specs = [TensorSpec(name, shape, name, shape) for name, shape in decoder_tensors(config).items()]
    if config.architecture == "mixtral":
        specs = [spec._replace(stored_name=_mixtral_name(spec.name)) for spec in specs]
    if config.architecture == "gemma3":
        specs = [spec._replace(addend=1.0) if spec.name.endswith("norm.weight") else spec for spec in specs]
    if model_type == "gemma3":
        specs = [spec._replace(stored_name=_with_vision(spec.name, stored)) for spec in specs]
    if model_type == "phi3":
        specs = [part_of(spec, "qkv_proj", qkv_rows(config)) for spec in specs]
        specs = [part_of(spec, "gate_up_proj", gate_up_rows(config)) for spec in specs]
    rows = part_rotary_rows(config)
    return tuple(spec._replace(head_rows=rows) if spec.is_rotated else spec for spec in specs)


def _mixtral_name(name: str) -> str:
    for ours, theirs in _MIXTRAL if ".mlp." in name else ():
        name = name.replace(ours, theirs)
    return name


def _with_vision(name: str, stored: Collection[str]) -> str:
    """The name within a model that also has a vision tower. It differs between versions of transformers."""
    rest = name.removeprefix("model.")
    for prefix, head_prefix in _TEXT_PREFIXES:
        if f"{prefix}embed_tokens.weight" in stored:
            return f"{prefix}{rest}" if rest != name else f"{head_prefix}{name}"
    return name
