"""Describes a Hugging Face folder: config.json, safetensors, tokenizer.json and what lies beside them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from actorserve.errors import ModelError
from actorserve.model_files.description import DecoderConfig, ModelDescription
from actorserve.model_files.tensors import check_tensors, decoder_tensors
from actorserve.model_files.values import Values, check_config, unsupported_architecture

_MAX_JSON_BYTES = 64 * 2**20
_INDEX = "model.safetensors.index.json"
_ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
_MAX_ROPE_FACTOR = 2**20
_ROPE_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_PARTIAL = "partial_rotary_factor"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def describe_folder(path: Path) -> ModelDescription:
    """Read a folder's JSON files and the headers of its safetensors.

    Raises: ModelError, when a file is missing, damaged or inconsistent, or the architecture is not supported.
    """
    raw = read_json(path / "config.json")
    config = check_config(_decoder_config(raw, path / "config.json"), path)
    weight_files, shapes = _weights(path)
    check_tensors({spec.hf_name: spec.shape for spec in decoder_tensors(config)}, shapes, path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path}: there is no tokenizer.json")
    generation = _read_optional(path / "generation_config.json")
    tokenizer = _read_optional(path / "tokenizer_config.json")
    bos_ids = _token_ids(raw, "bos_token_id", path, config.vocab_size)
    ends = [
        token_id
        for values in (generation, raw)
        for token_id in _token_ids(values, "eos_token_id", path, config.vocab_size)
    ]
    return ModelDescription(
        name=path.resolve().name,
        path=path,
        format="hf",
        config=config,
        weight_files=weight_files,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=bos_ids[0] if bos_ids else None,
        chat_template=_chat_template(path, tokenizer),
        special_tokens=_special_tokens(tokenizer),
    )


def read_json(path: Path) -> dict[str, object]:
    """Raises: ModelError, when the file is missing, too large, or not a JSON object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _read_optional(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _decoder_config(raw: Mapping[str, object], path: Path) -> DecoderConfig:
    values = Values(raw, path)
    model_type = values.text("model_type")
    # Mistral without a sliding window is computed exactly like Llama.
    if model_type not in ("llama", "mistral"):
        raise unsupported_architecture(model_type, path)
    context_length = values.integer("max_position_embeddings")
    if values.integer("sliding_window", context_length) < context_length:
        raise ModelError(f"{path}: attention with a sliding window is not supported")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{path}: quantized safetensors are not supported; use float weights, or a GGUF file")
    activation = values.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path}: activation {activation[:40]!r} is not supported; supported: silu")
    hidden_size = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads")
    rope_theta, rope_scaling = _rope(raw, path, context_length)
    return DecoderConfig(
        architecture="llama",
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=values.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=values.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=context_length,
        tie_word_embeddings=values.flag("tie_word_embeddings", False),
        attention_bias=values.flag("attention_bias", False),
        mlp_bias=values.flag("mlp_bias", False),
    )


def _rope(raw: Mapping[str, object], path: Path, context_length: int) -> tuple[float, dict[str, object] | None]:
    """RoPE's base and scaling, from ``rope_theta`` and ``rope_scaling`` or the newer ``rope_parameters``."""
    scaling: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if isinstance(value, dict):
            scaling |= value
        elif value is not None:
            raise ModelError(f"{path}: {key} must be an object")
    theta = Values({"rope_theta": raw.get("rope_theta")} | scaling, path).number("rope_theta", 10000.0)
    scaling.pop("rope_theta", None)
    legacy_type = scaling.pop("type", "default")
    rope_type = scaling.setdefault("rope_type", legacy_type)
    if any(part not in (None, 1.0) for part in (scaling.pop(_PARTIAL, None), raw.get(_PARTIAL))):
        raise ModelError(f"{path}: RoPE over a part of each head is not supported")
    if rope_type == "default":
        return theta, None
    if rope_type not in _ROPE_TYPES:
        supported = ", ".join(_ROPE_TYPES)
        raise ModelError(f"{path}: RoPE scaling {str(rope_type)[:40]!r} is not supported; supported: {supported}")
    values = Values(scaling, path)
    if values.number("factor") > _MAX_ROPE_FACTOR:
        raise ModelError(f"{path}: a RoPE scaling factor above {_MAX_ROPE_FACTOR} is not supported")
    for key in _ROPE_NUMBERS:
        if values.has(key):
            values.number(key, above=-math.inf)
    if rope_type == "llama3":
        values.integer("original_max_position_embeddings")
        if values.number("high_freq_factor") <= values.number("low_freq_factor"):
            raise ModelError(f"{path}: high_freq_factor must be above low_freq_factor")
    elif rope_type in ("yarn", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", context_length)
        values.integer("original_max_position_embeddings")
    return theta, scaling


def _weights(folder: Path) -> tuple[tuple[Path, ...], dict[str, tuple[int, ...]]]:
    """The folder's safetensors files, in order, and the shape of each tensor in them."""
    shapes: dict[str, tuple[int, ...]] = {}
    files = _weight_files(folder)
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a file handle, not a mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: not a whole safetensors file ({str(error)[:120]})") from None
    return files, shapes


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{folder / _INDEX}: weight_map is missing or damaged")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise ModelError(f"{folder / _INDEX}: names a file outside the folder, or one that is not safetensors")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder / missing[0]} does not exist")
        return tuple(folder / name for name in names)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise ModelError(f"{folder}: there are no safetensors files")
    return files


def _token_ids(raw: Mapping[str, object], key: str, path: Path, vocab_size: int) -> list[int]:
    value = raw.get(key)
    listed: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    ids: list[int] = []
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelError(f"{path}: {key} is not a token of the vocabulary")
        ids.append(token_id)
    return ids


def _chat_template(folder: Path, tokenizer: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ModelError(f"cannot read {file}") from None
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer: Mapping[str, object]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts
