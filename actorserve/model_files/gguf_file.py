"""Describes the model in a GGUF file."""

import re
from collections.abc import Iterable
from pathlib import Path

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription
from actorserve.model_files.gguf_config import decoder_config
from actorserve.model_files.gguf_reader import GgufFile, read_gguf
from actorserve.model_files.gguf_tensors import TYPES, is_harmless, stored_tensors
from actorserve.model_files.tensors import check_tensors
from actorserve.model_files.values import Values, check_config

_QUANTIZATION_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def describe_gguf(path: Path) -> ModelDescription:
    """Read a GGUF file's header (milliseconds per ten thousand tokens). RoPE's factors are the only tensors read.

    Raises: ModelError if the file is damaged, truncated, inconsistent, or of an unsupported architecture.
    """
    file = read_gguf(path)
    architecture = Values(file.metadata, path).text("general.architecture")
    num_parts = Values(file.metadata, path).integer("split.count", 1, minimum=0)
    if num_parts > 1:
        raise ModelError(f"{path}: split.count {num_parts}: one of several parts; merge them with llama-gguf-split")
    config = check_config(decoder_config(file, path, architecture), path)
    tensors = stored_tensors(config, architecture, file.tensors)
    check_tensors(tensors, {name: tensor.shape for name, tensor in file.tensors.items()}, path, is_harmless)
    _check_types({spec.stored_name for spec in tensors}, file, path)
    tokenizer = Values(file.metadata, path, "tokenizer.ggml.")
    tokens = tokenizer.texts("tokens")
    if len(tokens) > config.vocab_size:
        raise ModelError(f"{path}: {len(tokens)} tokens, but embeddings for {config.vocab_size}")
    last_id = len(tokens) - 1
    special_ids = {
        f"{name}_token": tokenizer.integer(f"{key}_token_id", minimum=0, maximum=last_id)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if tokenizer.has(f"{key}_token_id")
    }
    ends = [tokenizer.integer(key, minimum=0, maximum=last_id) for key in _END_KEYS if tokenizer.has(key)]
    template = Values(file.metadata, path, "tokenizer.")
    return ModelDescription(
        name=_QUANTIZATION_SUFFIX.sub("", path.stem),
        path=path,
        format="gguf",
        config=config,
        weight_files=(path,),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=special_ids.get("bos_token"),
        chat_template=template.text("chat_template") if template.has("chat_template") else None,
        special_tokens={name: tokens[token_id] for name, token_id in special_ids.items()},
        tokenizer_metadata={key: value for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")},
        tensors=tensors,
    )


def _check_types(names: Iterable[str], file: GgufFile, path: Path) -> None:
    for name in sorted(names):
        kind = file.tensors[name].type
        if kind not in TYPES:
            supported = ", ".join(known.name for known in sorted(TYPES))
            raise ModelError(f"{path}: tensor {name} has type {kind.name}; supported: {supported}")
