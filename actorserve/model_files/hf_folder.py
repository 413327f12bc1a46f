"""Describes the model in a Hugging Face folder: config.json, safetensors, tokenizer.json and further JSON files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from actorserve.errors import ModelError
from actorserve.model_files.description import ModelDescription, TensorSpec
from actorserve.model_files.hf_config import decoder_config
from actorserve.model_files.hf_quantization import Quantization, read_quantization
from actorserve.model_files.hf_tensors import is_harmless, stored_tensors
from actorserve.model_files.packing import Shape
from actorserve.model_files.tensors import check_tensors
from actorserve.model_files.values import Values, check_config

_MAX_JSON_BYTES = 64 * 2**20
_INDEX = "model.safetensors.index.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def describe_folder(path: Path, *, dummy: bool = False) -> ModelDescription:
    """Read a folder's JSON files and the headers of its safetensors; for a ``dummy``, only the JSON files.

    Raises: ModelError if a file is missing, damaged or inconsistent, or the architecture is not supported.
    """
    raw = read_json(path / "config.json")
    config = check_config(decoder_config(raw, path / "config.json"), path)
    quantization = read_quantization(Values(raw, path / "config.json"))
    weight_files: tuple[Path, ...] = ()
    found: dict[str, _Stored] = {}
    if not dummy:
        weight_files = _weight_files(path)
        found = _stored(weight_files)
    shapes = {name: stored.shape for name, stored in found.items()}
    tensors = stored_tensors(config, Values(raw, path).text("model_type"), shapes)
    if not dummy:
        tensors = _checked(tensors, quantization, found, path)
        if not (path / "tokenizer.json").is_file():
            raise ModelError(f"{path}: tokenizer.json is missing; transformers' save_pretrained writes one")
    generation = _read_optional(path / "generation_config.json")
    tokenizer = _read_optional(path / "tokenizer_config.json")
    text_config = Values(raw, path).mapping("text_config", {})  # if the model also has a vision tower
    bos_ids = [
        token_id
        for values in (raw, text_config)
        for token_id in _token_ids(values, "bos_token_id", path, config.vocab_size)
    ]
    ends = [
        token_id
        for values in (generation, raw, text_config)
        for token_id in _token_ids(values, "eos_token_id", path, config.vocab_size)
    ]
    return ModelDescription(
        name=path.resolve().name,
        path=path,
        format="dummy" if dummy else "hf",
        config=config,
        weight_files=weight_files,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=bos_ids[0] if bos_ids else None,
        chat_template=_chat_template(path, tokenizer),
        special_tokens=_special_tokens(tokenizer),
        tensors=tensors,
    )


def read_json(path: Path) -> dict[str, object]:
    """Raises: ModelError if the file is missing, too large, or not a JSON object."""
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


class _Stored(NamedTuple):
    """A tensor's header. ``kind``: its type, by safetensors' names."""

    file: Path
    shape: Shape
    kind: str


def _stored(files: Iterable[Path]) -> dict[str, _Stored]:
    """The headers of all tensors in the files, by name."""
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a file handle, not a mapping
                    tensor = tensors.get_slice(name)
                    found[name] = _Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: not a complete safetensors file ({str(error)[:120]})") from None
    return found


def _checked(
    specs: tuple[TensorSpec, ...], quantization: Quantization | None, found: Mapping[str, _Stored], path: Path
) -> tuple[TensorSpec, ...]:
    """The tensors with their packings. Raises: ModelError if the files do not hold exactly them, or in other types."""
    shapes = {name: stored.shape for name, stored in found.items()}
    if quantization is not None:
        specs = tuple(quantization.packed(spec, shapes) for spec in specs)
    check_tensors(
        specs,
        shapes,
        path,
        lambda name: is_harmless(name) or (quantization is not None and quantization.is_harmless(name)),
    )
    for spec in specs:
        for name, _, kinds in spec.parts:
            file, _, kind = found[name]
            if kind not in kinds:
                raise ModelError(f"{file}: tensor {name[:80]} has type {kind}; supported: {', '.join(kinds)}")
    return specs


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
        raise ModelError(f"{folder}: no safetensors files")
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
